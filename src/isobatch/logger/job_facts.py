"""What a run folder says of the command that made it, read from `.hydra/` as plain YAML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    overrides = [str(o) for o in _yaml(run_dir / ".hydra" / "overrides.yaml") or []]
    hydra = (_yaml(run_dir / ".hydra" / "hydra.yaml") or {}).get("hydra", {})
    telling = tuple(o for o in overrides if o.lstrip("+~").partition("=")[0].partition(".")[0] not in SILENT)
    if hydra.get("mode") != "MULTIRUN":
        return JobFacts(differing=telling)
    sweep = run_dir.parents[len(Path(str(_subdir(hydra))).parts) - 1]
    number = (hydra.get("job") or {}).get("num")
    # the sweep's own record has `accumulation=1,3,6` where a job has `accumulation=3`, and one word where all agree
    fixed = (((_yaml(sweep / "multirun.yaml") or {}).get("hydra") or {}).get("overrides") or {}).get("task") or []
    differing = tuple(o for o in telling if o not in fixed)
    return JobFacts(sweep, number if isinstance(number, int) else None, differing or telling)


def _subdir(hydra: dict[str, Any]) -> str:
    """`hydra.sweep.subdir`, of which only the depth matters; Hydra records it unresolved."""
    subdir = str((hydra.get("sweep") or {}).get("subdir") or "0")
    return subdir if "${" not in subdir else subdir.replace("${hydra.job.num}", "0").partition("${")[0] or "0"


def _yaml(file: Path) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the pure one takes 50 ms for hydra.yaml
    try:
        return yaml.load(file.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, yaml.YAMLError):
        return None
