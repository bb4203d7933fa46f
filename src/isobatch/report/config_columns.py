"""The config columns: what differs between the jobs of a sweep, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from isobatch.report.read import RunRecord, one_line

_OWN_TO_EACH_RUN = {"run_dir", "output_dir", "sweep_dir", "run_id", "run_name"}  # differ always, say nothing
MOST = 100  # columns; a config of ours has some 150 settings, anybody's may have thousands
Cell = str | float | int | bool | None


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Cell]]:
    """(dotted key, value) of every leaf. A list of values is one leaf, shown as JSON."""
    for key, value in config.items():
        name = f"{prefix}{one_line(key)}"
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{name}.")
        elif value is None or isinstance(value, bool | int | float):
            yield name, value
        else:
            yield name, one_line(value if isinstance(value, str) else json.dumps(value, default=str))


def _leaves(run: RunRecord) -> dict[str, Cell]:
    own = (str(run.folder), str(run.folder.resolve()))
    return {
        key: value
        for key, value in flatten(run.config)
        if not key.startswith("hydra.")
        and key.rsplit(".", 1)[-1] not in _OWN_TO_EACH_RUN
        and not (isinstance(value, str) and any(path in value for path in own))
    }


def differing(runs: Sequence[RunRecord]) -> tuple[list[str], list[dict[str, Cell]]]:
    """(keys, one {key: value} per run): the keys whose values differ, those named in an override first.

    A key that only some jobs have (an option of the group choice that they made) is a column only if its values
    differ among them, or if no differing `<group>.name` accounts for it.
    """
    leaves = [_leaves(run) for run in runs]
    known = [tree for tree in leaves if tree]  # a job that died before its config was written tells nothing
    every = dict.fromkeys(key for tree in known for key in tree)
    variety = {key: {(type(tree[key]), tree[key]) for tree in known if key in tree} for key in every}
    names = {key.rsplit(".", 1)[0] for key in every if key.endswith(".name") and len(variety[key]) > 1}

    def shown(key: str) -> bool:
        partly = any(key not in tree for tree in known)
        return len(variety[key]) > 1 or (partly and key.split(".", 1)[0] not in names)

    named = (override.lstrip("+~").split("=", 1)[0] for run in runs for override in run.overrides)
    overridden = {name.split("@")[0].replace("/", ".") for name in named}
    keys = [key for key in every if shown(key)]
    keys.sort(key=lambda key: key not in overridden and key.removesuffix(".name") not in overridden)
    for run, tree in zip(runs, leaves, strict=True):
        tree |= {key: chosen(run, key, tree[key]) for key in keys if key.endswith(".name") and key in tree}
    return keys[:MOST], leaves


def chosen(run: RunRecord, key: str, value: Cell) -> Cell:
    """Of a group's name, `value`, the choice that was typed: several (ddp, apex_ddp) may be one class with other options."""
    group = key.removesuffix(".name")
    words = [one_line(word.partition("=")[2]) for word in run.overrides if word.partition("=")[0] == group]
    return words[-1] if words and words[-1].isidentifier() else value
