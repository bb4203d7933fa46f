"""What `resume=RUN` starts from: the settings in RUN's config.yaml, under everything that is typed.

The run knows its own config: recipes and files that its author had in a conf/ of his own are not needed again. The folder
may come from anywhere, so what it says is filtered: settings of this program only, none that names code to import or
refers to anything. Nothing of it is given to Hydra's grammar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobatch.config import TABLES, Settings
from isobatch.config.schema import NESTED
from isobatch.errors import LONGEST, ConfigError, printable
from isobatch.resume.contract import EARLIER
from isobatch.run_folder import layout
from isobatch.run_folder.reading import Missing, Unreadable, read_mapping, resolvable

# `imports` names code; the others belong to one start of the program, not to the run
NEVER = {"imports", "task", "resume", "allow_contract_change", "sweep", "predict", "replay"}
KNOWN = set(Settings.__dataclass_fields__) - NEVER
PLAN_GROUPS = {"parallel", "accumulation"}  # what a hardware plan chooses, so that plan=... typed anew replaces them


@dataclass(frozen=True)
class SavedSettings:
    """
    Attributes:
        groups: group -> its options, in place of the file of the default choice.
        top: top-level keys.
        left_out: what is not taken over: setting -> a line for the person who resumes.
    """

    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def named(word: str | None) -> SavedSettings | None:
        """Of the folder that `resume=word` names from here; None where it names none, or several for a sweep.

        Raises:
            ConfigError: the saved settings cannot be read.
        """
        named = (word or "null").strip("'\"")
        if named in ("null", ""):
            return None
        run = run_folder((Path.cwd() / Path(named).expanduser()).resolve())
        return read(run) if run.is_dir() else None


def check_folder(word: str | None) -> None:
    """Refuse `resume=word` where there is no such folder, before anything is composed.

    Raises:
        ConfigError: there is none.
    """
    named = (word or "null").strip("'\"")
    if named in ("null", "") or "," in named:  # a list is a sweep over runs
        return
    if not run_folder((Path.cwd() / Path(named).expanduser()).resolve()).is_dir():
        raise ConfigError("resume", named, "no such folder", "set resume to the folder of a run (outputs/<date>/<time>)")


def run_folder(path: Path) -> Path:
    """The run folder that `path` is, or that the checkpoint folder `path` belongs to."""
    return path.parent.parent if path.parent.name == layout.CHECKPOINTS and (path / "manifest.json").is_file() else path


def read(run: Path) -> SavedSettings:
    """The usable settings of RUN/config.yaml, and a line for each other one that a person may want to type."""
    try:
        config = read_mapping(run, layout.CONFIG)
    except Missing:
        config = {}
    except Unreadable as problem:
        raise ConfigError("resume", run, f"its config.yaml {problem}", "use another run folder") from None
    saved = SavedSettings()
    if config.get("imports"):
        shown = printable(str(config["imports"]))[:LONGEST]
        saved.left_out["imports"] = f"{run} was started with imports={shown}: type it again if you trust it"
    for group, table in TABLES.items():
        node = config.get(group)
        name = node.get("name") if isinstance(node, Mapping) else None
        if not isinstance(node, Mapping) or not isinstance(name, str):
            continue
        taken = {str(key): value for key, value in node.items()}
        _drop_references(taken, f"{group}.", run, saved.left_out)
        if "name" in taken and name in table:  # else it is of a module that is to be imported, and knows its own options
            known = {f.name for f in dataclasses.fields(table[name])}
            taken = {key: value for key, value in (EARLIER.get(group, {}) | taken).items() if key in known}
            taken = defaults_of(table[name]) | taken
        if "name" in taken:
            saved.groups[group] = taken
    for key in KNOWN & set(config):
        if key in NESTED and isinstance(config[key], Mapping):
            options = [f.name for f in dataclasses.fields(NESTED[key])]
            nested = EARLIER.get(key, {}) | config[key]
            saved.top.update({f"{key}.{option}": nested[option] for option in options if option in nested})
        else:
            saved.top[key] = config[key]
    _drop_references(saved.top, "", run, saved.left_out)
    return saved


def defaults_of(cls: type) -> dict[str, Any]:
    """The plain defaults of an options class; what has none is left out."""
    plain = (type(None), bool, int, float, str, list, dict)
    made = {f.name: f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            for f in dataclasses.fields(cls)}  # fmt: skip
    return {name: value for name, value in made.items() if isinstance(value, plain)}


def _drop_references(settings: dict[str, Any], prefix: str, run: Path, left_out: dict[str, str]) -> None:
    """Take out every setting that holds an interpolation, which would read the environment of whoever resumes."""
    for key in [key for key, value in settings.items() if resolvable([key, value])]:
        del settings[key]
        left_out[prefix + key] = f"{prefix}{printable(key)} of {run} refers to something else: type it again if it is meant"
