"""What `resume=RUN` adds to the command line: the settings that RUN was started with, wherever nothing else is typed.

Read before Hydra composes, because a setting may only exist with the choice that RUN made (`parallel.nproc` with
`parallel=ddp`). The folder may come from anywhere, so what it says is filtered: settings of this program only, none
that names code to import, reads the environment or leaves conf/.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from isobatch.config import TABLES, Settings
from isobatch.errors import ConfigError
from isobatch.resume.contract import EARLIER

WORD = re.compile(r"(?P<sign>\+{0,2})(?P<key>[A-Za-z_][\w./]*)=(?P<value>.*)", re.DOTALL)
# `imports` names code; the others belong to one start of the program, not to the run
NEVER = {"imports", "task", "resume", "allow_contract_change"}
OVERLAYS = {"experiment", "plan"}
KNOWN = {*TABLES, *OVERLAYS, *Settings.__dataclass_fields__} - NEVER
PLAN_GROUPS = {"parallel", "accumulation"}  # what a hardware plan chooses, so that plan=... typed anew replaces them
SIZE_LIMIT = 1 << 20  # bytes of a saved file


def expand(words: list[str], cwd: Path) -> tuple[list[str], list[str]]:
    """`words` with the saved settings of the run that `resume=` names put before it, and lines to tell the person.

    Raises:
        ConfigError: no such folder, or the saved settings cannot be read.
    """
    typed = {match["key"]: match["value"] for word in words if (match := WORD.fullmatch(word))}
    named = typed.get("resume", "null").strip("'\"")
    if named in ("null", ""):
        return words, []
    run = run_folder((cwd / Path(named).expanduser()).resolve())
    if not run.is_dir() and "," not in named:  # a list is a sweep over runs
        raise ConfigError("resume", named, "no such folder", "set resume to the folder of a run (outputs/<date>/<time>)")
    saved, told = saved_words(run)
    kept = [word for word in [*earlier(run), *saved] if not _shadowed(word, typed)]
    at = next(i for i, word in enumerate(words) if (m := WORD.fullmatch(word)) and m["key"] == "resume")
    return [*words[:at], *kept, *words[at:]], told


def run_folder(path: Path) -> Path:
    """The run folder that `path` is, or that the checkpoint folder `path` belongs to."""
    return path.parent.parent if path.parent.name == "checkpoints" and (path / "manifest.json").is_file() else path


def saved_words(run: Path) -> tuple[list[str], list[str]]:
    """The usable ones of RUN/.hydra/overrides.yaml, and a line for each other one that a person may want to type."""
    words = _yaml(run, run / ".hydra" / "overrides.yaml")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError("resume", run, "its .hydra/overrides.yaml is no list of settings", "use another run folder")
    paths = _absolute_paths(run)
    kept, told = [], []
    for word in words:
        match = WORD.fullmatch(word)
        root = re.split(r"[./]", match["key"])[0] if match else ""
        if match is None or root not in KNOWN:
            if root == "imports":
                told.append(f"{run} was started with {word}: type it again if you trust it")
        elif not usable(match["key"], match["value"]):
            told.append(f"{word} is not taken over from {run}: type it again if it is meant")
        elif match["key"] in paths:
            kept.append(f"{match['sign']}{match['key']}={quoted(paths[match['key']])}")
        else:
            kept.append(word)
    return kept, told


def earlier(run: Path) -> list[str]:
    """Settings that RUN left at defaults which have changed since: as it had them."""
    config = _yaml(run, run / "config.yaml")
    words = []
    for group, options in EARLIER.items():
        saved: Any = config.get(group) if isinstance(config, dict) else None
        table = {f.name for f in fields(TABLES[group][saved["name"]])} if _known(group, saved) else set()
        for option, before in options.items():
            value = saved.get(option, before) if option in table else None
            if isinstance(value, type(before)) and re.fullmatch(r"\w+", str(value)):
                words.append(f"++{group}.{option}={str(value).lower()}")  # also where somebody's own conf/ lacks it
    return words


def _known(group: str, saved: Any) -> bool:
    return isinstance(saved, dict) and isinstance(saved.get("name"), str) and saved["name"] in TABLES[group]


def usable(key: str, value: str) -> bool:
    """False for a value that would read the environment, or a choice of a group that would leave conf/."""
    if "${" in value and ":" in value:  # a resolver: ${oc.env:WANDB_API_KEY}
        return False
    choice = key in TABLES or key in OVERLAYS
    return not choice or bool(re.fullmatch(r"[\w+-][\w.+-]*(/[\w+-][\w.+-]*)*", value.strip("'\"")))


def _shadowed(word: str, typed: dict[str, str]) -> bool:
    """Whether what is typed now takes the place of a saved word."""
    match = WORD.fullmatch(word)
    assert match is not None
    key = match["key"]
    root = key.split(".")[0]
    if key in typed or (root in typed and root in TABLES):
        return True  # the choice of a group is typed anew: settings of the old choice may not exist there
    if "plan" in typed and root in PLAN_GROUPS:
        return True
    # of epochs and steps one is null: the one that is typed with a number replaces both
    return key in ("epochs", "steps") and typed.get("epochs", "null") != "null"


def _absolute_paths(run: Path) -> dict[str, str]:
    """Input paths as the run resolved them, since they may have been typed relative to another folder."""
    config = _yaml(run, run / "config.yaml")
    data = config.get("data") if isinstance(config, dict) else None
    root = data.get("root") if isinstance(data, dict) else None
    return {"data.root": root} if isinstance(root, str) and root else {}


def quoted(text: str) -> str:
    """`text` as Hydra's grammar reads it back."""
    if re.fullmatch(r"[\w./-]+", text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _yaml(run: Path, path: Path) -> Any:
    import yaml

    try:
        if not path.is_file():
            return []
        if path.stat().st_size > SIZE_LIMIT:
            raise ValueError("too large")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml refuses deep nesting at once
        return yaml.load(path.read_text(encoding="utf-8"), Loader=loader) or []
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        problem = f"its {path.name} cannot be read ({type(error).__name__})"
        raise ConfigError("resume", run, problem, "use another run folder") from None


