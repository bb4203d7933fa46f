"""What a run folder says of the command that made it, read from `.hydra/` as plain YAML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.run_folder import layout
from isobatch.run_folder.reading import Unreadable, read_yaml

# Where and how a run is recorded is no part of what is trained.
SILENT = ("hydra", "logger", "resume", "imports", "log_every", "task")


@dataclass(frozen=True)
class JobFacts:
    """
    Attributes:
        sweep: the sweep's folder, None for a run of its own.
        number: of the job in its sweep.
        differing: the overrides that make it differ from the other jobs, or from the defaults if it is alone.
    """

    sweep: Path | None = None
    number: int | None = None
    differing: tuple[str, ...] = ()

    @property
    def group(self) -> str | None:
        """The sweep's stamp, <date>_<time> (a slash would break W&B's addresses), or its folder's name."""
        if self.sweep is None:
            return None
        date = self.sweep.parent.name
        return f"{date}_{self.sweep.name}" if date[:2] == "20" and date.count("-") == 2 else self.sweep.name


def read(run_dir: Path) -> JobFacts:
    """The facts of `run_dir`; empty ones where Hydra wrote nothing."""
    listed = _yaml(run_dir, ".hydra/overrides.yaml")
    overrides = [word for word in listed if isinstance(word, str)] if isinstance(listed, list) else []
    hydra = _at(_yaml(run_dir, ".hydra/hydra.yaml"), "hydra") or {}
    telling = tuple(o for o in overrides if o.lstrip("+~").partition("=")[0].partition(".")[0] not in SILENT)
    depth = len(Path(str(_subdir(hydra))).parts)
    if _at(hydra, "mode") != "MULTIRUN" or not 0 < depth <= len(run_dir.parents):
        return JobFacts(differing=telling)
    sweep = run_dir.parents[depth - 1]
    number = _at(hydra, "job", "num")
    # the sweep's own record has `accumulation=1,3,6` where a job has `accumulation=3`, and one word where all agree
    fixed = _at(_yaml(sweep, layout.MULTIRUN), "hydra", "overrides", "task")
    differing = tuple(o for o in telling if not isinstance(fixed, list) or o not in fixed)
    return JobFacts(sweep, number if isinstance(number, int) else None, differing or telling)


def _subdir(hydra: dict[str, Any]) -> str:
    """`hydra.sweep.subdir`, of which only the depth matters; Hydra records it unresolved."""
    subdir = str(_at(hydra, "sweep", "subdir") or "0")
    return subdir if "${" not in subdir else subdir.replace("${hydra.job.num}", "0").partition("${")[0] or "0"


def _at(node: Any, *keys: str) -> Any:
    """What stands at `keys`, one below the other; None where it leads nowhere."""
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node


def _yaml(run: Path, name: str) -> Any:
    try:
        return read_yaml(run, name)
    except Unreadable:
        return None
