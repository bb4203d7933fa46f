"""The leaderboard: columns, rows and their order, the same for the terminal, the CSV file and the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isobatch import better
from isobatch.report.cells import show
from isobatch.report.config_columns import MOST, Cell, differing
from isobatch.report.metrics import MILESTONES
from isobatch.report.names import job_names, one_training, short, swept
from isobatch.report.read import RunRecord, direction, one_line
from isobatch.report.scan import number
from isobatch.run_folder import layout

CONFIG, RESULT, SPEED, MEMORY, SAME = "config", "result", "speed", "memory and processes", "same training"
ERROR = "reason"
JOB = "job"
REPEATS = {"seed", "data.fold", "data.split_seed"}  # settings in which jobs differ that repeat one training


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
        return short(self.key, (self.key,)) if self.key in ("accumulation.steps",) else (
            self.key.removesuffix(".name") if self.group == CONFIG else self.key)  # fmt: skip


@dataclass(frozen=True)
class Leaderboard:
    """The runs, best first, with one row (column key -> value, None for unknown) for each of them."""

    runs: Sequence[RunRecord]
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Cell]]
    primary: str | None  # the column that the rows are ordered by
    config_keys: Sequence[str]
    names: Sequence[str] = ()  # what a person calls each run: by what differs
    foreign: Sequence[Path] = ()  # runs of other programs beside them
    swept: Sequence[str] = ()  # columns of the settings that were swept

    @property
    def one_training(self) -> bool:
        """Whether the jobs are one training on several plans, whose losses should not part."""
        return one_training(self.config_keys)

    @property
    def failed(self) -> int:
        """How many jobs did not complete."""
        return sum(not run.completed for run in self.runs)

    @property
    def pruned(self) -> int:
        return sum(run.state == layout.PRUNED for run in self.runs)

    def best(self, key: str) -> float | None:
        """The best finite value of a column among the completed jobs; None where no direction is known."""
        column = next((c for c in self.columns if c.key == key), None)
        if column is None or column.better == 0:
            return None
        finite = self._competing(key).values()
        return (max if column.better > 0 else min)(finite) if finite else None

    def _competing(self, key: str) -> dict[int, float]:
        """Row -> value, of the rows that are compared: completed trainings with a finite value."""
        values = {at: number(row[key]) for at, row in enumerate(self.rows)
                  if self.runs[at].completed and trains(self.runs[at])}  # fmt: skip
        return {at: value for at, value in values.items() if math.isfinite(value)}

    def winners(self, key: str) -> list[int]:
        """The rows that show a column's best value, in order: equal figures are equal to a person."""
        best = show(self.best(key))
        return [at for at in self._competing(key) if show(self.rows[at][key]) == best]

    def leading(self, key: str) -> list[int]:
        """The winners, where they have beaten somebody: alone, or among equals, nothing is best."""
        winners = self.winners(key)
        return winners if len(winners) < len(self._competing(key)) else []

    def spread(self) -> str | None:
        """What repeats of one training reach, where the jobs differ in seeds or folds alone; None = they do not."""
        values = [number(row[self.primary]) for row, run in zip(self.rows, self.runs, strict=True)
                  if self.primary and run.completed and trains(run)]  # fmt: skip
        if not self.swept or not REPEATS.issuperset(self.swept) or len(values) < 2 or not all(map(math.isfinite, values)):
            return None
        return (f"{self.primary} over {', '.join(self.swept)}: mean {statistics.fmean(values):.6g}, standard deviation "
                f"{statistics.stdev(values):.3g}, of {len(values)} jobs")  # fmt: skip


def trains(run: RunRecord) -> bool:
    """Whether the job is a training: what task=evaluate, export and plan leave is listed, and not ranked."""
    return run.config.get("task", "train") == "train"


def tabulate(runs: Sequence[RunRecord]) -> Leaderboard:
    """Builds the leaderboard of these runs: completed ones by their best primary metric, then the others."""
    keys, leaves = differing(runs)
    chosen, extra = swept(runs, keys)
    synthetic = [key for key in chosen if key not in keys]
    metrics = [_metrics(run) for run in runs]
    names = sorted({name for pair in metrics for which in pair for name in which}, key=_metric_order)[:MOST]
    ranked = [pair for pair, run in zip(metrics, runs, strict=True) if trains(run)] or metrics
    primary = next((f"best {name}" for name in _PRIMARY if any(name in best for _, best in ranked)), None)
    columns = [Column(JOB, CONFIG, rank=1)]
    keys = [*chosen, *(key for key in keys if key not in chosen)]
    # what was swept is always shown
    settings = [Column(key, CONFIG, rank=1 if key in chosen[:_SWEPT] else 10 + i) for i, key in enumerate(keys)]
    columns += settings[: len(chosen)] or settings
    results = [Column("state", RESULT, rank=1)]
    for name in names:
        for which, pick in (("best", 1), ("final", 0)):
            if any(name in pair[pick] for pair in metrics):
                key = f"{which} {name}"
                results.append(Column(key, RESULT, direction(name), 1 if key == primary else _RANKS.get(key, 0)))
    # the narrowest screen shows what was swept and what the jobs are ranked by
    columns += sorted(results, key=lambda column: column.key != primary) + (settings[len(chosen) :] if chosen else [])
    same = [column for column in _FIXED if column.group == SAME]
    plans = one_training([key for key in keys if key not in synthetic] or synthetic)
    if plans:
        columns += _FIXED
    else:  # trainings of their own: that their losses part is no news
        columns += [column for column in _FIXED if column.group not in (SAME, ERROR)]
        columns += [replace(column, rank=0) for column in same] + [_FIXED[-1]]
    rows = [_row(run, {**leaf, **more}, keys, pair) for run, leaf, more, pair in zip(runs, leaves, extra, metrics, strict=True)]
    used = {c.key for c in columns if any(row.get(c.key) is not None for row in rows)}
    columns = [c for c in columns if c.key in used or c.group == CONFIG]

    def place(index: int) -> tuple[bool | float, ...]:
        order: list[bool | float] = [not runs[index].completed, runs[index].state == layout.PRUNED, not trains(runs[index])]
        ties = ("best eval/loss", "final eval/loss", "final train/loss") if runs[index].completed else ()
        for key in (primary, *ties):
            value, sign = number(rows[index].get(key or "")), direction((key or "").partition(" ")[2])
            order += [not math.isfinite(value), -sign * value if math.isfinite(value) else 0.0]
        return tuple(order)

    order = sorted(range(len(runs)), key=place)  # stable: jobs that tie keep their order
    full = [{c.key: rows[i].get(c.key) for c in columns} for i in order]
    ordered = [runs[i] for i in order]
    return Leaderboard(ordered, columns, full, primary, keys, job_names(ordered, full, chosen or keys), swept=chosen)


_PRIMARY = (*better.MAIN, "train/loss")
_SWEPT = 6  # settings that the terminal always shows
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
    Column("main device %", MEMORY),
    Column("busy % by device", MEMORY),
    Column("pids", MEMORY),
    Column("loss scale", MEMORY),
    Column("skipped steps", MEMORY),
    Column("error", ERROR),
]


def _metric_order(name: str) -> tuple[int, str]:
    return (_PRIMARY.index(name) if name in _PRIMARY else len(_PRIMARY)), name


def _metrics(run: RunRecord) -> tuple[dict[str, float], dict[str, float]]:
    """(final, best) of a run; of one that died, what its metrics.jsonl still tells. NaN is never best."""
    final, best = run.summary.get("final"), run.summary.get("best")
    last = {
        key: value for row in (run.metrics.last_train, run.metrics.last_eval) for key, value in row.items() if key in _PRIMARY
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


def parting_text(run: RunRecord) -> Cell:
    """The first step at which the losses part from the reference run's, or that they never do."""
    d = run.difference
    if d.common_steps == 0:
        return None
    if d.parted is not None:
        return d.parted
    return "identical" if d.only_here == d.only_there == 0 else f"identical in {d.common_steps} common steps"


def _row(
    run: RunRecord, leaf: Mapping[str, Cell], keys: Sequence[str], metrics: Sequence[Mapping[str, float]]
) -> dict[str, Cell]:
    summary, last = run.summary, run.metrics.last_train
    perf, time = summary.get("perf") or {}, summary.get("time") or {}
    peaks, busy = [memory.peak_mb for memory in run.memory], [memory.busy for memory in run.memory]
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
        "main device %": 100 * peaks[0] / sum(peaks) if len(peaks) > 1 else None,
        "busy % by device": ", ".join(f"{share:.0f}" for share in busy if share is not None) or None,
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
