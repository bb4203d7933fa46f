"""Two metrics.jsonl side by side: the first row in which they part, and how far apart the numbers lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobatch.run_folder.reading import Unreadable
from isobatch.run_folder.rows import is_evaluation, rows, step_of

# what a clock or a memory meter says differs between any two runs
MEASURED = ("perf/", "memory/", "time/", "mfu")
MEASURED_KEYS = {"time_s", "_timestamp", "_runtime", "audit/chain"}  # a chain follows from its links, and from where they are

Key = tuple[int, int]  # step, and 0 for a row of training, 1 for an evaluation


@dataclass(frozen=True)
class Parting:
    """The first logged value that is not the same in both runs."""

    step: int
    key: str
    here: Any
    there: Any

    @property
    def distance(self) -> float:
        return distance(self.here, self.there)


@dataclass
class RowComparison:
    """What two runs logged, compared.

    common: rows that both have, with a number that both say; only_first, only_other: rows of one alone (other lengths, other
    log_every).
    first: where they part, None if all common values are the same to the bit.
    largest: metric -> largest relative distance over all common rows, of metrics that are not always the same.
    """

    common: int = 0
    only_first: int = 0
    only_other: int = 0
    first: Parting | None = None
    largest: dict[str, float] = field(default_factory=dict)


def compare_rows(first: Path, other: Path) -> RowComparison:
    """Both files in one pass; memory does not grow with them."""
    result = RowComparison()
    here, there = _ordered(first), _ordered(other)
    a, b = next(here, None), next(there, None)
    while a is not None or b is not None:
        if b is None or (a is not None and a[0] < b[0]):
            result.only_first += 1
            a = next(here, None)
        elif a is None or b[0] < a[0]:
            result.only_other += 1
            b = next(there, None)
        else:
            result.common += _compare(a[0][0], a[1], b[1], result)
            a, b = next(here, None), next(there, None)
    return result


def _compare(step: int, here: dict[str, Any], there: dict[str, Any], result: RowComparison) -> bool:
    """Whether there was anything to compare."""
    keys = [key for key in here if key in there and key not in MEASURED_KEYS and not key.startswith(MEASURED)]
    for key in keys:
        value = here[key]
        if same(value, there[key]):
            continue
        if result.first is None:
            result.first = Parting(step, key, value, there[key])
        result.largest[key] = max(result.largest.get(key, 0.0), distance(value, there[key]))
    return any(key != "step" for key in keys)


def same(here: Any, there: Any) -> bool:
    """Equal to the bit; NaN is equal to NaN."""
    return bool(here == there or (here != here and there != there))


def distance(here: Any, there: Any) -> float:
    """|here - there| over the larger of the two; inf for what are no two finite numbers."""
    try:
        a, b = float(here), float(there)
    except (TypeError, ValueError, OverflowError):
        return math.inf
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if same(a, b) or str(here) == str(there) else math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-300) if a != b else 0.0


def _ordered(path: Path) -> Iterator[tuple[Key, dict[str, Any]]]:
    """The rows in rising order; what a killed writer left half-written, or wrote twice, is passed over."""
    latest: Key = (-1, 0)
    with suppress(Unreadable):
        for row in rows(path.parent, path.name):
            step = step_of(row)
            if step is not None and (key := (step, int(is_evaluation(row)))) > latest:
                latest = key
                yield key, row
