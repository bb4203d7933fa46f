"""Finding runs below some folders and reading the small files of each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobatch import better
from isobatch.report.distance import Distance
from isobatch.report.metrics import Metrics
from isobatch.report.scan import number
from isobatch.run_folder import layout
from isobatch.run_folder.reading import Missing, Unreadable, read_json, read_yaml

DIED = "died without a summary (or is still running)"
NOT_BEGUN = "not begun"
_OURS = {"parallel", "accumulation", "reduction", "batch", "task"}  # settings that every config of ours has
_NOT_RUNS = {layout.CHECKPOINTS, "wandb", "report"}  # inside these no run can be
_UP = ("accuracy", "acc", "top1", "top5", "f1", "auc", "auroc", "precision", "recall", "map", "iou", "r2",
       "samples_per_s")  # fmt: skip
_DOWN = ("loss", "error", "perplexity", "nll", "mse", "mae", "rmse")


class ReportError(ValueError):
    """The folders hold nothing to report. One line; exit code 2."""

    exit_code = 2


@dataclass(frozen=True)
class DeviceMemory:
    """Peak memory of one device (or of one process on CPU), in MB, and the per cent of its time that it was busy."""

    label: str
    peak_mb: float
    busy: float | None = None


@dataclass
class RunRecord:
    """One job of a sweep, whether it came to an end or not."""

    job: str
    folder: Path
    state: str
    error: str | None
    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    overrides: Sequence[str]
    plan: Mapping[str, Any]
    memory: Sequence[DeviceMemory]
    pids: Sequence[int]
    metrics: Metrics = field(default_factory=Metrics)
    difference: Distance = field(default_factory=Distance)

    @property
    def completed(self) -> bool:
        return self.state in layout.ENDED

    @property
    def ending(self) -> str:
        """How it ended, and why if that is known; "stopped by SIGTERM" says both."""
        error = self.error or ""
        return error if error.startswith(self.state) else ": ".join(filter(None, (self.state, error)))


def direction(metric: str) -> int:
    """+1 if a higher value of this metric is better, -1 if a lower one, 0 if neither is known.

    Another program's metrics have names of its own, which are guessed from.
    """
    if metric in better.KNOWN:
        return better.sign(metric, "auto")
    name = metric.rsplit("/", 1)[-1].lower()
    if name.endswith("scale"):  # of the loss: neither is better
        return 0
    if any(name == word or name.endswith("_" + word) or name.startswith(word + "_") for word in _DOWN):
        return -1
    return int(any(name == word or name.endswith("_" + word) or name.startswith(word + "_") for word in _UP))


def one_line(text: object) -> str:
    """The text on one line, without control characters (a terminal would obey them)."""
    return "".join(c for c in " ".join(str(text).split()) if c.isprintable())


def find_runs(folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """(job name, folder) of every run below the folders, in the order of the folders and of the job numbers.

    A run is a folder with a summary.json, or with a .hydra of a job that died before it wrote one. Raises
    ReportError if a folder is missing or if there is no run at all.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ReportError(f"{one_line(folder)} is not a folder; give the folder of a run or of a sweep")
        for run in _runs_below(folder):
            if not foreign(run):
                found.setdefault(run.resolve(), run)
    if not found:
        names = ", ".join(one_line(folder) for folder in folders) or "no folder"
        raise ReportError(f"no run found in {names}; a run is a folder that holds summary.json")
    root = Path(os.path.commonpath([path.parent for path in found]))
    return [(path.relative_to(root).as_posix(), path) for path in found]


def foreign(folder: Path) -> bool:
    """Whether another program that uses Hydra left this folder: it has no file of ours, and none of our settings."""
    if any((folder / name).exists() for name in (layout.SUMMARY, layout.CONFIG, layout.METRICS)):
        return False
    config, _ = _mapping(folder, ".hydra/config.yaml")
    return bool(config) and not _OURS & set(config)


def foreign_runs(folders: Sequence[Path]) -> list[Path]:
    """Folders below `folders` that other programs left, to be listed apart."""
    return [run for folder in folders if folder.is_dir() for run in _runs_below(folder) if foreign(run)]


def never_begun(found: Sequence[tuple[str, Path]]) -> list[RunRecord]:
    """The jobs that a sweep was to run and did not come to, by the list that it left beside its jobs (jobs.json)."""
    runs = []
    for sweep in dict.fromkeys(folder.parent for _, folder in found):
        here = {folder.name: job for job, folder in found if folder.parent == sweep}
        planned, _ = _mapping(sweep, "jobs.json")
        if not planned or not here.keys() <= planned.keys():  # folders by another name than the job's number
            continue
        prefix = next(iter(here.values())).rpartition("/")[0]
        for job, overrides in planned.items():
            if job not in here and not (sweep / job).exists():
                words = [str(word) for word in _list(overrides)]
                name, why = f"{prefix}/{job}".lstrip("/"), "the sweep ended before it"
                runs.append(RunRecord(name, sweep / job, NOT_BEGUN, why, {}, {}, words, {}, [], []))
    return runs


def _runs_below(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        if layout.SUMMARY in files or ".hydra" in folders:
            folders.clear()
            yield Path(here)
        else:
            folders[:] = sorted((f for f in folders if f[0] != "." and f not in _NOT_RUNS), key=_natural)


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]


def read_run(job: str, folder: Path) -> RunRecord:
    """One run as its small files tell it; the metrics come in `runs.py`."""
    summary, problem = _mapping(folder, layout.SUMMARY)
    config, _ = _mapping(folder, layout.CONFIG)
    if not config:
        config, _ = _mapping(folder, ".hydra/config.yaml")
    error = summary.get("error")
    if problem:
        error = DIED if problem == "missing" else f"summary.json is not readable: {problem}"
    ranks = [rank for rank in _list(summary.get("ranks")) if isinstance(rank, dict)]
    return RunRecord(
        job=job,
        folder=folder,
        state="died" if problem else one_line(summary.get("state", "unknown")),
        error=one_line(error) if error else None,
        summary=summary,
        config=config,
        overrides=[str(o) for o in _list(_load(folder, ".hydra/overrides.yaml")[0])],
        plan=summary["plan"] if isinstance(summary.get("plan"), dict) else _mapping(folder, layout.PLAN)[0],
        memory=[memory for rank in ranks for memory in _memory(rank)],
        pids=[int(rank["pid"]) for rank in ranks if isinstance(rank.get("pid"), int)],
    )


def _memory(rank: Mapping[str, Any]) -> list[DeviceMemory]:
    """One entry per device: a process of DataParallel reports `peak_memory_mb` as a map from device to MB."""
    peak, label, busy = rank.get("peak_memory_mb"), f"rank {rank.get('rank', '?')}", rank.get("busy_percent")
    peaks = peak.items() if isinstance(peak, dict) else [(rank.get("device", ""), peak)]
    shares = busy if isinstance(busy, dict) else dict.fromkeys((device for device, _ in peaks), busy)
    return [DeviceMemory(one_line(f"{label} {device}"), number(mb), _share(shares.get(device)))
            for device, mb in peaks if number(mb) > 0]  # fmt: skip


def _share(value: object) -> float | None:
    return number(value) if isinstance(value, int | float) and 0 <= value <= 100 else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(run: Path, name: str) -> tuple[dict[str, Any], str | None]:
    value, problem = _load(run, name)
    return (value, problem) if isinstance(value, dict) else ({}, problem or "not a mapping")


def _load(run: Path, name: str) -> tuple[Any, str | None]:
    """(content, None) or (None, one-line problem); the problem of a file that is not there is "missing"."""
    try:
        return (read_json if name.endswith(".json") else read_yaml)(run, name), None
    except Missing:
        return None, "missing"
    except Unreadable as problem:
        return None, f"it {problem}"
