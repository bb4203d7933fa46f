"""The mean of several checkpoints of one run: `checkpoint.load=mean` (Izmailov et al. 2018; timm's avg_checkpoints.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from isobatch.checkpoint.folder import Damaged

WEIGHTS = ("model", "ema")


def mean(states: Iterator[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """(the first state with the mean of all weights and running statistics in it, how many there were).

    Sums are in float64; whole numbers (counters of batches) are the first state's. One state is in memory at a time.

    Raises:
        Damaged: the weights of one have other names or shapes.
    """
    newest, count = next(states), 1
    kept = {part: newest[part] for part in WEIGHTS if newest.get(part)}
    sums = {part: {name: t.double() for name, t in weights.items() if t.is_floating_point()} for part, weights in kept.items()}
    for state in states:
        for part, totals in sums.items():
            found = state.get(part) or {}
            if {name: t.shape for name, t in found.items()} != {name: t.shape for name, t in kept[part].items()}:
                raise Damaged("its checkpoints hold other weights than the newest")
            for name, total in totals.items():
                total += found[name].double()
        count += 1
    made = {part: {name: (sums[part][name] / count).to(t.dtype) if name in sums[part] else t for name, t in weights.items()}
            for part, weights in kept.items()}  # fmt: skip
    return {**newest, **made}, count
