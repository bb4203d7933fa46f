"""`audit=replay`: every N steps each rank computes one shard of another rank again, before the update is applied.

Equal bits on every plan make it possible: a device that computes wrongly (silent data corruption) gives other bits than
one that does not. What is compared are digests of what the training itself took from the shard, its loss, its statistics
and its gradients, with those of the second computation. Both the shard and the rank that computes it rotate.

A difference is judged by computing the shard a third time, on a third rank where there is one, else by both once more: a
transient fault is right the next time, and who then agrees with whom tells whose bits were off.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobatch.audit.digest import of_tensor
from isobatch.audit.judge import Computation, Suspects, judge
from isobatch.audit.repeat import Kept, run_shard
from isobatch.runtime.randomness import isolated_generators

if TYPE_CHECKING:
    from isobatch.batch_plan import Window
    from isobatch.data.feed import Feed, MicroBatch, Source
    from isobatch.runtime.distributed import Ranks
    from isobatch.train.state import TrainState
    from isobatch.train.step import Parts

log = logging.getLogger("isobatch")


class Witness:
    """Keeps digests of what the training takes from one shard. The reducer calls it."""

    def __init__(self, names: Sequence[str]):
        self.names = names
        self.shard: int | None = None
        self.gradients: dict[str, str] = {}
        self.statistics = ""

    def watch(self, shard: int | None) -> None:
        self.shard, self.gradients, self.statistics = shard, {}, ""

    def took_gradients(self, shard: int, ids: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        if shard == self.shard:
            self.gradients |= {self.names[i]: of_tensor(g) for i, g in zip(ids, gradients, strict=True)}

    def took_statistics(self, shard: int, flat: Tensor) -> None:
        if shard == self.shard:
            self.statistics = of_tensor(flat)

    def digests(self, losses: Tensor) -> dict[str, str]:
        """In the order in which one follows from another; `losses` (V,) float64. The last layer's gradient comes first."""
        assert self.shard is not None
        last_first = {name: self.gradients.get(name, "") for name in reversed(self.names)}
        return {"loss": of_tensor(losses[self.shard].double()), "statistics": self.statistics, **last_first}
