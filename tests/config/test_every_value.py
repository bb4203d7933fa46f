"""An option that is accepted does something: every value of a choice and of a closed set, and two of every other option.

Each is trained a few tiny steps; what can be seen of it (rows, weights, parts, files, words, a refusal) has to differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import plain, train
from omegaconf import MissingMandatoryValue
from tried_data import FORMS, KINDS, written
from tries import ALIKE, BASE, CHOICES, CHOICES_OF, MLP, SYNTHETIC, TRIES, Try

from isobatch import checks, tasks
from isobatch.config import TABLES, Settings, conf_folder, load
from isobatch.config.schema import NESTED
from isobatch.errors import ConfigError, JobFailed

TESTS = Path(__file__).parents[1]
OWN = {group: {name: cls for name, cls in table.items() if cls.__module__.startswith("isobatch.")}
       for group, table in TABLES.items()}  # fmt: skip
ECHOES = ("identity", "parallel", "precision", "batch_norm", "data_fingerprint")  # say what was set, not what came of it
OF_THE_MACHINE = re.compile(r"^(perf|time|mem)|_s$|time")


def options() -> Iterator[tuple[str, str, dataclasses.Field[Any]]]:
    """(choice or "", key, field) of every option of our own."""
    for group, table in OWN.items():
        for name, cls in table.items():
            for field in dataclasses.fields(cls):
                if field.name != "name":
                    yield f"{group}={name}", f"{group}.{field.name}", field
    for field in dataclasses.fields(Settings):
        if field.name not in NESTED:
            yield "", field.name, field
    for prefix, cls in NESTED.items():
        for field in dataclasses.fields(cls):
            yield "", f"{prefix}.{'from' if (prefix, field.name) == ('replay', 'start') else field.name}", field


def the_try(choice: str, key: str) -> Try | None:
    return TRIES.get(f"{choice}.{key.partition('.')[2]}") or TRIES.get(key)


def test_every_option_says_how_it_is_tried() -> None:
    known = set()
    for choice, key, _ in options():
        assert the_try(choice, key), f"{choice} {key}: a line in tries.py, with values that make a difference"
        known |= {key, f"{choice}.{key.partition('.')[2]}"}
    assert set(TRIES) <= known, "options that are gone"
    assert set(CHOICES_OF) == set(TABLES), "groups without a line in tries.py"
    texts: dict[str, str] = {}
    for tried in (*CHOICES_OF.values(), *filter(None, (the_try(choice, key) for choice, key, _ in options()))):
        if tried.held_by:
            file, _, name = tried.held_by.partition("::")
            text = texts.setdefault(file, (TESTS.parent / file).read_text())
            assert name and f"def {name}(" in text, tried.held_by
    for choice, key, field in options():
        if (tried := the_try(choice, key)) and tried.read_in:
            code = [path.read_text() for path in (TESTS.parent / "src/isobatch" / tried.read_in).glob("*.py")]
            assert re.search(rf"\.{field.name}\b|\"{field.name}\"", re.sub(r"\w+\(\"[\w.]+\", self\.\w+", "", "".join(code))), (
                key
            )


@functools.cache
def closed_sets() -> dict[str, tuple[Any, ...]]:
    """key -> what `choice` lets it be, as the classes with their defaults ask."""
    found: dict[str, list[Any]] = {}

    def noting(key: str, value: object, allowed: Any) -> None:
        found.setdefault(key, []).extend(a for a in allowed if a not in found.get(key, []))
        original(key, value, allowed)

    original = checks.choice
    modules = [m for n, m in sys.modules.items() if n.startswith("isobatch") and getattr(m, "choice", None) is original]
    for module in modules:
        module.choice = noting  # type: ignore[attr-defined]
    try:
        for group in TABLES:
            for file in sorted((conf_folder() / group).glob("*.yaml")):
                with contextlib.suppress(ConfigError, MissingMandatoryValue):
                    load(plain(f"{group}={file.stem}"))
    finally:
        for module in modules:
            module.choice = original  # type: ignore[attr-defined]
    return {key: tuple(values) for key, values in found.items()}


def shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def values(key: str, field: dataclasses.Field[Any], tried: Try) -> tuple[str, ...]:
    if tried.values:
        return tried.values
    if "bool" in str(field.type):
        return "false", "true"
    return tuple(shown(value) for value in (closed_sets()[key] if key != "task" else tuple(tasks.TABLE)))


class Seen:
    """What runs leave, by their words; each is run once."""

    def __init__(self, root: Path):
        self.root, self.known = root, {}

    def __call__(self, choice: str, *words: str) -> dict[str, Any]:
        form = choice.removeprefix("data=") if choice.removeprefix("data=") in FORMS else "image_folder"
        line = " ".join((CHOICES.get(choice, choice), *words))
        if form == "hugging_face":
            line = line.replace("data.root=", "data.path=")
        while re.search(r"(?<!\{)\{\w+\}(?!\})", line):
            line = re.sub(r"(?<!\{)\{(\w+)\}(?!\})", lambda found: self.place(found[1], form), line)
        typed = tuple(line.replace("{{", "{").replace("}}", "}").split())
        typed = (*(() if "model=" in line else MLP), *(() if "data=" in line else SYNTHETIC), *typed)
        if typed not in self.known:
            self.known[typed] = self.run(typed)
        return self.known[typed]

    def place(self, name: str, form: str) -> str:
        """What a placeholder stands for: words, a folder of `form`, or a run that is made for it."""
        if name in ("files", "masks"):
            return CHOICES["data=image_folder" if name == "files" else "data=mask_folder"]
        if name in ("begun", "averaged"):
            run = self.root / name
            if not run.exists():
                train(
                    run,
                    *BASE,
                    *MLP,
                    *SYNTHETIC,
                    "checkpoint.every=2",
                    *(["ema=ema", "ema.decay=0.9"] if name == "averaged" else []),
                )
            return f"resume={run}"
        return written(self.root / "data", f"{form}_{name}" if name in KINDS else name)

    def run(self, words: tuple[str, ...]) -> dict[str, Any]:
        folder = self.root / str(len(self.known))
        parts: list[Any] = []

        def look(state: Any, built: Any, window: Any) -> None:
            group = {k: v for k, v in state.optimizer.param_groups[0].items() if k != "params"}
            parts[:] = [repr(state.model), type(state.optimizer).__name__, repr(group), repr(state.scaler.state_dict()),
                        [p.stride() for p in state.parameters], type(state.ema).__name__,
                        torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()]  # fmt: skip

        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                train(folder, *BASE, *words, observe=look)
        except (ConfigError, JobFailed, SystemExit) as error:  # anything else is a traceback to whoever typed it
            return {"refused": str(error).replace(str(folder), "")}
        finally:
            torch.use_deterministic_algorithms(False)
        return {"parts": parts, "said": words_of(said.getvalue(), folder), **left(folder)}


def words_of(text: str, folder: Path) -> list[str]:
    """What was said, without the plan's lines and without speeds."""
    lines = [re.sub(r", [\d,.]+ samples/s|[\d,.]+ (ms|s|MB|GB)\b|\d+:\d\d", "", line) for line in text.splitlines()]
    return [line.replace(str(folder), "") for line in lines if not re.match(r"  [a-z]+ {2,}|plan$", line)]


def left(folder: Path) -> dict[str, Any]:
    def read(name: str) -> Any:
        return json.loads((folder / name).read_text()) if (folder / name).exists() else {}

    rows = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    summary, plan = read("summary.json"), read("plan.json")
    return {
        "rows": [{k: v if not OF_THE_MACHINE.search(k) else "" for k, v in json.loads(row).items()} for row in rows],
        "summary": {k: summary.get(k) for k in ("state", "steps", "updates", "final", "best", "weights_sha256", "error")},
        "plan": {k: v for k, v in plan.items() if k not in ECHOES},
        "fingerprint": plan.get("data_fingerprint"),
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "events"),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(tmp_path_factory.mktemp("seen"))


TRIED = [row for row in options() if (tried := the_try(*row[:2])) and not (tried.held_by or tried.read_in or tried.same)]


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "key", "field"), TRIED, ids=lambda v: v if isinstance(v, str) else "")
def test_every_value_of_an_option_does_something(choice: str, key: str, field: dataclasses.Field[Any], seen: Seen) -> None:
    tried = the_try(choice, key)
    assert tried is not None
    found = {}
    for value in values(key, field, tried):
        found[value] = seen(choice, tried.words, f"++{key}.{tried.entry}={value}" if tried.entry else f"{key}={value}")
    explicit = [value for value in found if value not in ("auto", "null") or tried.values]  # these mean one of the others
    for one, other in itertools.combinations(explicit, 2):
        assert found[one] != found[other], f"{key}={one} and {other}: {found[one].get('refused', 'nothing differs')}"


@pytest.mark.slow
@pytest.mark.parametrize("group", [group for group, tried in CHOICES_OF.items() if not tried.held_by])
def test_every_choice_of_a_group_does_something(group: str, seen: Seen) -> None:
    tried = CHOICES_OF[group]
    names = [path.stem for path in sorted((conf_folder() / group).glob("*.yaml")) if path.stem != "custom"]
    found = {name: seen(f"{group}={name}", tried.words) for name in names if (group, name) not in ALIKE}
    for one, other in itertools.combinations(found, 2):
        assert found[one] != found[other], f"{group}={one} and {other}: {found[one].get('refused', 'nothing differs')}"
