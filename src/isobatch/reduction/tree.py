"""`tree`: the shards' gradients summed along one fixed binary tree.

Floating-point sums depend on how they are bracketed, so the brackets are fixed by the number of filled shards alone:
the left part of a node is the largest power of two below its size. A rank folds its own shards into the largest whole
nodes it can, sends those to each element's owner, and the owner folds the rest. Which rank computes a node changes
nothing; addition is commutative, so the order of the operands does not either.

A shard that gives a tensor no gradient is left out, as a plain sum would do. On the wire that is -0.0, the one value
that changes no sum (x + -0.0 is x for every x, +0.0 turns -0.0 into 0.0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobatch.reduction.buckets import Bucket
from isobatch.reduction.exchange import Scratch, keeps_own, to_everybody, to_owners

Node = tuple[int, int]


def split(start: int, stop: int) -> int:
    """Where the node over shards start .. stop-1 (at least two) is cut."""
    return start + (1 << ((stop - start - 1).bit_length() - 1))


def cover(shards: range, start: int, stop: int) -> list[Node]:
    """The largest nodes of the tree over start .. stop-1 that contain nothing but `shards`, from left to right."""
    if shards.start <= start and stop <= shards.stop:
        return [(start, stop)]
    if not shards or shards.stop <= start or stop <= shards.start:
        return []
    middle = split(start, stop)
    return cover(shards, start, middle) + cover(shards, middle, stop)


def parents(start: int, stop: int) -> dict[Node, Node]:
    """Node -> the node it is a half of."""
    if stop - start < 2:
        return {}
    middle = split(start, stop)
    halves = {(start, middle): (start, stop), (middle, stop): (start, stop)}
    return halves | parents(start, middle) | parents(middle, stop)


class TreeLayout(NamedTuple):
    """The tree over `num_filled` shards, laid over the ranks: each rank's nodes, and how nodes join."""

    num_filled: int
    nodes: list[list[Node]]
    parents: dict[Node, Node]


class Layouts:
    """Layouts by number of filled shards (two differ at most in an ordinary run: a full window and the tail).

    dealt: number of filled shards -> those of each rank.
    """

    def __init__(self, dealt: Callable[[int], list[range]], rank: int, num_ranks: int):
        self.dealt, self.rank, self.num_ranks = dealt, rank, num_ranks
        self.known: dict[int, TreeLayout] = {}

    def __call__(self, num_filled: int) -> TreeLayout:
        if num_filled not in self.known:
            nodes = [cover(shards, 0, num_filled) for shards in self.dealt(num_filled)]
            self.known[num_filled] = TreeLayout(num_filled, nodes, parents(0, num_filled))
        return self.known[num_filled]


class Partial(NamedTuple):
    """A node's sum on this rank; None where no shard of the node gave a gradient."""

    node: Node
    values: list[Tensor | None]


def fold(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    """left + right, in place of `left`."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


class TreeSum:
    """The tree's sum of one bucket: `begin`, `leaf` for every shard of this rank, `launch`, `reduce`, `result`."""

    def __init__(self, bucket: Bucket, index: int, layouts: Layouts, scratch: Scratch):
        self.bucket, self.index, self.layouts, self.scratch = bucket, index, layouts, scratch
        self.rank, self.num_ranks = layouts.rank, layouts.num_ranks
        self.stack: list[Partial] = []
        self.work: Any = None
        if self.num_ranks > 1:
            # home of the leftmost partial sum, then of the result: it takes the place of autograd's own tensors
            self.full = torch.zeros(bucket.padded, dtype=bucket.dtype, device=bucket.device)
            self.views = bucket.views(self.full)

    def begin(self, num_filled: int) -> None:
        self.layout = self.layouts(num_filled)
        self.nodes = self.layout.nodes[self.rank]
        self.stack.clear()

    def leaf(self, shard: int, gradients: list[Tensor | None]) -> None:
        """Take the gradients of `shard`; the tensors are this object's from now on. Shards come in ascending order."""
        dtype = self.bucket.dtype
        values = [None if g is None else g.to(dtype) for g in gradients]
        if self.num_ranks > 1 and not self.stack:
            values = self._settle(values)
        self.stack.append(Partial((shard, shard + 1), values))
        while len(self.stack) > 1:
            parent = self.layout.parents[self.stack[-1].node]
            if self.layout.parents[self.stack[-2].node] != parent:
                break
            right, left = self.stack.pop(), self.stack.pop()
            self.stack.append(Partial(parent, fold(left.values, right.values)))

    def _settle(self, values: list[Tensor | None]) -> list[Tensor | None]:
        copy_into(self.views, values)
        return list(self.views)

    def launch(self) -> None:
        """Send this rank's nodes to the owners."""
        if self.num_ranks == 1:
            return
        share, count = self.bucket.padded // self.num_ranks, len(self.nodes)
        sizes = [len(nodes) * share for nodes in self.layout.nodes]
        if keeps_own(self.bucket.device):
            sizes[self.rank] = 0
        self.sent = self._packed(share, count)
        self.received = self._scratch("received", sum(sizes))
        self.work = to_owners(self.received, self.sent, sizes, count * share)

    def _packed(self, share: int, count: int) -> Tensor:
        """This rank's nodes, cut by owner: (ranks, nodes, share) as a flat tensor."""
        if count == 0:
            return self.full[:0]
        if count == 1:
            return self.full
        sent = self._scratch("sent", count * self.bucket.padded)
        slots = sent.view(self.num_ranks, count, share)
        slots[:, 0].copy_(self.full.view(self.num_ranks, share))
        packed = self._scratch("packed", self.bucket.padded)
        views = self.bucket.views(packed)
        for k, partial in enumerate(self.stack[1:], 1):
            copy_into(views, partial.values)
            slots[:, k].copy_(packed.view(self.num_ranks, share))
        return sent

    def reduce(self) -> None:
        """Fold the rest of the tree for this rank's share, and start handing the result round."""
        if self.num_ranks == 1:
            return
        self.work.wait()
        share = self.bucket.padded // self.num_ranks
        mine = self.full[self.rank * share : (self.rank + 1) * share]
        total = self._folded(self._parts(share, mine), (0, self.layout.num_filled), mine)
        if total is not mine:
            mine.copy_(total)
        self.stack.clear()
        self.work = to_everybody(self.full, mine)

    def _parts(self, share: int, mine: Tensor) -> dict[Node, Tensor]:
        """What each node, of whatever rank, has for this rank's share, (share,)."""
        if not keeps_own(self.bucket.device):
            names = [node for nodes in self.layout.nodes for node in nodes]
            return dict(zip(names, self.received.split(share), strict=True))
        names = [node for rank, nodes in enumerate(self.layout.nodes) if rank != self.rank for node in nodes]
        parts = dict(zip(names, self.received.split(share) if names else (), strict=True))
        if self.nodes:  # the first of the own ones lies where the result goes
            own = self.sent.view(self.num_ranks, len(self.nodes), share)[self.rank]
            parts |= zip(self.nodes, (mine, *own[1:]), strict=True)
        return parts

    def _folded(self, parts: dict[Node, Tensor], node: Node, mine: Tensor) -> Tensor:
        """The node's sum, in the memory of one of its parts: of `mine`, if that is among them."""
        if node in parts:
            return parts[node]
        middle = split(*node)
        left, right = self._folded(parts, (node[0], middle), mine), self._folded(parts, (middle, node[1]), mine)
        return torch.add(left, right, out=right if right is mine else left)

    def result(self) -> list[Tensor | None]:
        """The sums, shaped as the tensors; where all ranks' gradients were None the value means nothing."""
        if self.num_ranks == 1:
            (partial,) = self.stack
            self.stack.clear()
            return partial.values
        self.work.wait()
        return list(self.views)

    def _scratch(self, purpose: str, size: int) -> Tensor:
        return self.scratch.take(purpose, self.index, size, self.bucket.dtype, self.bucket.device)


def copy_into(views: list[Tensor], values: list[Tensor | None]) -> None:
    """Copy `values` into flat memory, -0.0 for None."""
    present = [(view, value) for view, value in zip(views, values, strict=True) if value is not None]
    if present:
        torch._foreach_copy_([view for view, _ in present], [value for _, value in present])
    for view, value in zip(views, values, strict=True):
        if value is None:
            view.fill_(-0.0)
