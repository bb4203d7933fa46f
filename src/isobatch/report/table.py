"""The leaderboard: columns, rows and their order, the same for the terminal, the CSV file and the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobatch.report.config_columns import MOST, Cell, differing
from isobatch.report.metrics import MILESTONES
from isobatch.report.read import Run, direction, one_line
from isobatch.report.scan import number

CONFIG, RESULT, SPEED, MEMORY, SAME = "config", "result", "speed", "memory and processes", "same training"
ERROR = "reason"
JOB = "job"


@dataclass(frozen=True)
class Column:
    """One column. better: +1 if the highest value is best, -1 if the lowest is, 0 if none is."""

    key: str
    group: str
    better: int = 0
    rank: int = 0  # the terminal is narrow: 0 is not shown there, 1 always, of the others the highest gives way first

    @property
    def title(self) -> str:
        """The heading: a group's choice goes by the name of the group."""
        return self.key.removesuffix(".name") if self.group == CONFIG else self.key


@dataclass(frozen=True)
class Comparison:
    """The runs, best first, with one row (column key -> value, None for unknown) for each of them."""

    runs: Sequence[Run]
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Cell]]
    primary: str | None  # the column that the rows are ordered by
    config_keys: Sequence[str]

    @property
    def failed(self) -> int:
        """How many jobs did not complete."""
        return sum(not run.completed for run in self.runs)

    def best(self, key: str) -> float | None:
        """The best finite value of a column among the completed jobs; None where no direction is known."""
        column = next((c for c in self.columns if c.key == key), None)
        if column is None or column.better == 0:
            return None
        values = [number(row[key]) for row, run in zip(self.rows, self.runs, strict=True) if run.completed]
        finite = [value for value in values if math.isfinite(value)]
        return (max if column.better > 0 else min)(finite) if finite else None


def tabulate(runs: Sequence[Run]) -> Comparison:
    """Builds the leaderboard of these runs: completed ones by their best primary metric, then the others."""
    keys, leaves = differing(runs)
    metrics = [_metrics(run) for run in runs]
    names = sorted({name for pair in metrics for which in pair for name in which}, key=_metric_order)[:MOST]
    columns = [Column(JOB, CONFIG, rank=1)]
    columns += [Column(key, CONFIG, rank=2 + i) for i, key in enumerate(keys)]
    columns += [Column("state", RESULT, rank=1)]
    for name in names:
        for which, pick in (("best", 1), ("final", 0)):
            if any(name in pair[pick] for pair in metrics):
                rank = _RANKS.get(f"{which} {name}", 0)
                columns.append(Column(f"{which} {name}", RESULT, direction(name), rank))
    columns += _FIXED
    primary = next((f"best {name}" for name in _PRIMARY if any(name in best for _, best in metrics)), None)
    rows = [_row(run, leaf, keys, pair) for run, leaf, pair in zip(runs, leaves, metrics, strict=True)]
    used = {c.key for c in columns if any(row.get(c.key) is not None for row in rows)}
    columns = [c for c in columns if c.key in used or c.group == CONFIG]

    def place(index: int) -> tuple[bool, bool, float]:
        value = number(rows[index].get(primary or ""))
        sign = direction((primary or "").removeprefix("best "))
        return not runs[index].completed, not math.isfinite(value), -sign * value if math.isfinite(value) else 0.0

    order = sorted(range(len(runs)), key=place)  # stable: jobs that tie keep their order
    full = [{c.key: rows[i].get(c.key) for c in columns} for i in order]
    return Comparison([runs[i] for i in order], columns, full, primary, keys)


_PRIMARY = ("eval/accuracy", "eval/loss", "train/loss")
_RANKS = {"best eval/accuracy": 2, "best eval/loss": 4, "final train/loss": 3}
_FIXED = [
    Column("updates", RESULT),
    Column("losses part at", SAME, rank=1),
    Column("loss difference", SAME),
    Column("weight distance", SAME),
    Column("weights", SAME),
    Column("plan", SPEED),
    Column("samples/s", SPEED, 1, rank=2),
    *[Column(f"s at {step}", SPEED, -1) for step in MILESTONES],
    Column("train s", SPEED, -1),
    Column("peak MB", MEMORY, -1, rank=5),
    Column("peak MB by rank", MEMORY),
    Column("imbalance", MEMORY, -1),
    Column("pids", MEMORY),
    Column("loss scale", MEMORY),
    Column("skipped steps", MEMORY),
    Column("error", ERROR),
]


def _metric_order(name: str) -> tuple[int, str]:
    return (_PRIMARY.index(name) if name in _PRIMARY else len(_PRIMARY)), name


def _metrics(run: Run) -> tuple[dict[str, float], dict[str, float]]:
    """(final, best) of a run; of one that died, what its metrics.jsonl still tells. NaN is never best."""
    final, best = run.summary.get("final"), run.summary.get("best")
    last = {
        key: value
        for row in (run.metrics.last_train, run.metrics.last_eval)
        for key, value in row.items()
        if key in _PRIMARY
    }
    final = final if isinstance(final, dict) and final else last
    best = best if isinstance(best, dict) and best else run.metrics.best
    return (
        {one_line(k): number(v) for k, v in final.items() if isinstance(v, int | float)},
        {one_line(k): number(v) for k, v in best.items() if math.isfinite(number(v))},
    )


def plan_text(plan: Mapping[str, Any]) -> str | None:
    """The arithmetic in one cell: effective batch, then micro batch x replicas x accumulation steps."""
    parts = [plan.get(key) for key in ("effective_batch", "micro_batch", "num_replicas", "accumulation_steps")]
    return None if None in parts else "{} = {} × {} × {}".format(*map(one_line, parts))


def parting_text(run: Run) -> Cell:
    """The first step at which the losses part from the reference run's, or that they never do."""
    d = run.difference
    if d.common_steps == 0:
        return None
    if d.parted is not None:
        return d.parted
    return "identical" if d.only_here == d.only_there == 0 else f"identical in {d.common_steps} common steps"


def _row(
    run: Run, leaf: Mapping[str, Cell], keys: Sequence[str], metrics: Sequence[Mapping[str, float]]
) -> dict[str, Cell]:
    summary, last = run.summary, run.metrics.last_train
    perf, time = summary.get("perf") or {}, summary.get("time") or {}
    peaks = [memory.peak_mb for memory in run.memory]
    digest = summary.get("weights_sha256")
    row: dict[str, Cell] = {key: leaf.get(key) for key in keys}
    row |= {f"final {name}": value for name, value in metrics[0].items()}
    row |= {f"best {name}": value for name, value in metrics[1].items()}
    row |= {f"s at {step}": seconds for step, seconds in run.metrics.seconds.items()}
    row |= {
        JOB: run.job,
        "state": run.state,
        "updates": _known(summary.get("updates", last.get("update"))),
        "plan": plan_text(run.plan),
        "samples/s": _known(perf.get("samples_per_s") if isinstance(perf, dict) else None),
        "train s": _known(time.get("train_s") if isinstance(time, dict) else None),
        "peak MB": max(peaks, default=None),
        "peak MB by rank": ", ".join(f"{peak:.0f}" for peak in peaks) if len(peaks) > 1 else None,
        "imbalance": max(peaks) * len(peaks) / sum(peaks) if len(peaks) > 1 else None,
        "pids": ", ".join(map(str, run.pids)) or None,
        "loss scale": _known(last.get("train/loss_scale")),
        "skipped steps": _known(summary.get("skipped_steps", last.get("train/skipped_steps"))),
        "weights": one_line(digest)[:12] if digest else None,
        "weight distance": run.difference.weights,
        "loss difference": run.difference.loss,
        "losses part at": parting_text(run),
        "error": run.error,
    }
    return row


def _known(value: object) -> Cell:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
