"""One shard computed twice: whose it is in which audit, and the digests of a computation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from isobatch.audit import digest

if TYPE_CHECKING:
    from isobatch.batch_plan import Window
    from isobatch.data.feed import MicroBatch

EARLY = "its inputs", "its statistics", "its loss"  # before the gradients, which follow from those


class Round:
    """Who looks at whom in the audit with this number: the same on all ranks. filled: the shards of each in `window`."""

    def __init__(self, number: int, window: Window, filled: list[range]):
        self.window, self.ranks, self.filled = window, len(filled), filled
        others = max(1, self.ranks - 1)
        self.turn, self.distance = number // others, 1 + number % others if self.ranks > 1 else 0

    def owner_of(self, auditor: int) -> int:
        return (auditor + self.distance) % self.ranks

    def auditor_of(self, owner: int) -> int:
        return (owner - self.distance) % self.ranks

    def shard_of(self, owner: int) -> int | None:
        """Which of its shards is looked at; None = it has none in this window."""
        shards = self.filled[owner]
        return shards[self.turn % len(shards)] if len(shards) else None


class ShardDigests:
    """Digests of one computation of a shard: what went in, and what came out."""

    def __init__(self, shard: int | None, parameters: int):
        self.shard, self.parameters = shard, parameters
        self.found = digest.Digests(len(EARLY) + parameters)

    def inputs(self, micro: MicroBatch) -> None:
        self.found = digest.Digests(len(EARLY) + self.parameters)  # afresh, should a window be run once more
        every = [leaf for leaf in tree_leaves((micro.inputs, micro.targets)) if isinstance(leaf, Tensor)]
        digests = digest.Digests(len(every))
        for place, tensor in enumerate(every):
            digests.add(place, tensor)
        digests.flush()
        self.entered = digests

    def loss(self, losses: Tensor | None, shard: int) -> None:
        """`losses` (V,), of which that of `shard` counts."""
        if losses is not None:
            self.found.add(2, losses[shard : shard + 1])

    def statistics(self, flat: Tensor) -> None:
        self.found.add(1, flat)
        self.found.flush()

    def gradients(self, ids: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        for i, gradient in zip(ids, gradients, strict=True):
            self.found.add(len(EARLY) + i, gradient)
        self.found.flush()  # the memory is somebody else's from now on

    def values(self) -> list[int]:
        values = self.found.values()
        if hasattr(self, "entered"):
            values[0] = digest.of_plain(self.entered.values())
        return values


class Aside:
    """Stands in for the reducer of a shard that is computed again."""

    def __init__(self, reducer: Any, found: ShardDigests):
        self.module, self.loss_factor, self.losses, self.found = reducer.module, reducer.loss_factor, reducer.losses, found

    def shard(self, micro: MicroBatch) -> Any:
        return nullcontext()

    def record(self, micro: MicroBatch, weighted_loss: Tensor) -> None:
        self.found.loss(weighted_loss.detach().to(self.losses.dtype).reshape(1), 0)

    def add_buffers(self, micro: MicroBatch, flat: Tensor) -> None:
        self.found.statistics(flat)
