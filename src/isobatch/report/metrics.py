"""What the report keeps of a run's metrics: a few hundred whole rows per curve, the rest as two arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from isobatch import better
from isobatch.report.scan import BEFORE, Scan, number, parse
from isobatch.run_folder.reading import SIZE, Unreadable
from isobatch.run_folder.rows import open_rows

MILESTONES = (20, 40, 60, 80, 100)  # the iterations whose seconds the leaderboard shows
Row = Mapping[str, object]


@dataclass(frozen=True)
class Series:
    """Columns of some rows, all of one length; a value that a row lacks is NaN."""

    columns: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, rows: Sequence[Row], keys: Sequence[str]) -> Series:
        return cls({key: np.array([number(row.get(key)) for row in rows], dtype=np.float64) for key in keys})

    def __len__(self) -> int:
        return max((len(column) for column in self.columns.values()), default=0)

    def __getitem__(self, key: str) -> np.ndarray:
        return self.columns[key]


@dataclass
class Metrics:
    """What the report needs from one metrics.jsonl.

    `steps` and `losses` (same length) hold every logged step; `train` and `evals` hold at most the asked number of
    points; `seconds` maps a milestone iteration to the seconds since training started.
    """

    steps: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    losses: np.ndarray = field(default_factory=lambda: np.empty(0))
    train: Series = field(default_factory=lambda: Series({}))
    evals: Series = field(default_factory=lambda: Series({}))
    last_train: Row = field(default_factory=dict)
    last_eval: Row = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[int, float] = field(default_factory=dict)

    def drop_losses(self) -> None:
        """Frees the arrays that grow with the length of the run, once it has been compared."""
        self.steps, self.losses = np.empty(0, np.int64), np.empty(0)


TRAIN_KEYS = ("step", "samples", "time_s", "train/loss", "train/lr")
EVAL_KEYS = ("step", "samples", "time_s", "eval/loss", "eval/accuracy")


def thin(values: np.ndarray, limit: int) -> np.ndarray:
    """Indices of at most `limit` of the values: the lowest and the highest of each bucket, the first and the last.

    Spikes survive, which a mean or every n-th point would hide. NaN loses to every number, but a bucket of nothing
    else keeps one, so that a diverged run shows as a gap.
    """
    count = len(values)
    if count <= limit:
        return np.arange(count)
    low = np.where(np.isnan(values), np.inf, values)
    high = np.where(np.isnan(values), -np.inf, values)
    edges = np.linspace(0, count, max(1, (limit - 2) // 2) + 1).astype(np.int64)
    chosen = {0, count - 1}
    for start, stop in itertools.pairwise(edges):
        chosen.add(int(start + low[start:stop].argmin()))
        chosen.add(int(start + high[start:stop].argmax()))
    return np.array(sorted(chosen), dtype=np.int64)


def _best(rows: Sequence[Row], direction: Callable[[str], int]) -> dict[str, float]:
    best: dict[str, float] = {}
    signs: dict[str, int] = {}
    for row in rows:
        for key, value in row.items():
            sign = signs.get(key)
            if sign is None:
                sign = signs[key] = direction(key) if key.startswith("eval/") else 0
            if sign and (key not in best or sign * (number(value) - best[key]) > 0) and math.isfinite(number(value)):
                best[key] = number(value)
    return best


def read_metrics(path: Path, limit: int, direction: Callable[[str], int]) -> Metrics:
    """Reads a metrics.jsonl in one pass; an empty `Metrics` if there is none that can be read.

    limit: points kept per curve. direction: metric name -> +1 (up is better), -1 (down is better) or 0 (neither).
    """
    try:
        file = open_rows(path.parent, path.name)
    except Unreadable:
        return Metrics()
    with file:
        scan = Scan(file)
        steps, losses = np.array(scan.steps, dtype=np.int64), np.array(scan.losses, dtype=np.float64)

        def row_at(offset: int) -> dict[str, object]:
            file.seek(offset)
            return parse(file.readline(SIZE))

        train = [row_at(scan.offsets[i]) for i in thin(losses, limit)]
        curve = np.array([number(row.get(better.main(row))) for row in scan.evals])
        evals = [scan.evals[i] for i in thin(curve, limit)]
        for row in evals:
            if row[BEFORE] is not None and not {"samples", "time_s"} <= row.keys():
                before = row_at(int(number(row[BEFORE])))
                row.update({key: before[key] for key in ("samples", "time_s") if key in before and key not in row})
        seconds = {}
        for step in MILESTONES:
            at = int(np.searchsorted(steps, step))
            if at < len(steps) and steps[at] == step:
                time_s = number(row_at(scan.offsets[at]).get("time_s"))
                if np.isfinite(time_s):
                    seconds[step] = time_s
    return Metrics(
        steps=steps,
        losses=losses,
        train=Series.of(train, TRAIN_KEYS),
        evals=Series.of(evals, EVAL_KEYS),
        last_train=train[-1] if train else {},
        last_eval={k: v for k, v in scan.evals[-1].items() if k != BEFORE} if scan.evals else {},
        best=_best(scan.evals, direction),
        seconds=seconds,
    )
