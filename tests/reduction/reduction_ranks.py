"""Ranks without processes: the sums of several ranks side by side, their exchanges done by copying in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from isobatch.reduction import bin64, tree
from isobatch.reduction.bin64 import BinSum, Units
from isobatch.reduction.buckets import Bucket, make_bucket
from isobatch.reduction.exchange import Scratch
from isobatch.reduction.tree import Layouts, TreeSum

Gradients = list[list[Tensor | None]]  # of each shard, of each tensor


class Round:
    """Stands in for one collective: carried out when the first rank waits for it, which is after all have started it."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self.calls: list[tuple[Tensor, Tensor]] = []
        self.done = False

    def wait(self) -> None:
        assert len(self.calls) == self.num_ranks
        if not self.done:
            self.done = True
            self.carry_out()

    def carry_out(self) -> None:
        raise AssertionError


class ToOwners(Round):
    def carry_out(self) -> None:
        pieces = [sent.clone().view(self.num_ranks, -1) for _, sent in self.calls]
        for rank, (received, _) in enumerate(self.calls):  # nobody sends to himself
            received.copy_(torch.cat([piece[rank] for of, piece in enumerate(pieces) if of != rank]))


class ToEverybody(Round):
    def carry_out(self) -> None:
        whole = torch.cat([part.clone() for _, part in self.calls])
        for full, _ in self.calls:
            full.copy_(whole)


class Wire:
    """One exchange of each kind, as `exact.ExactReducer` would start them for one bucket."""

    def __init__(self, num_ranks: int):
        self.owners, self.everybody = ToOwners(num_ranks), ToEverybody(num_ranks)

    def to_owners(self, received: Tensor, sent: Tensor, receive_sizes: list[int], send_size: int) -> Round:
        assert received.numel() == sum(receive_sizes) and sent.numel() == send_size * len(receive_sizes)
        self.owners.calls.append((received, sent))
        return self.owners

    def to_everybody(self, full: Tensor, part: Tensor) -> Round:
        assert full.numel() == part.numel() * self.everybody.num_ranks
        self.everybody.calls.append((full, part))
        return self.everybody


@contextmanager
def wire(num_ranks: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        line = Wire(num_ranks)
        for module in (tree, bin64):
            patch.setattr(module, "to_owners", line.to_owners)
            patch.setattr(module, "to_everybody", line.to_everybody)
        yield


def bucket_of(gradients: Gradients, num_ranks: int) -> Bucket:
    samples = [next(g for g in column if g is not None) for column in zip(*gradients, strict=True)]
    return make_bucket(list(range(len(samples))), samples, num_ranks)


def copies(gradients: list[Tensor | None]) -> list[Tensor | None]:
    return [None if g is None else g.clone() for g in gradients]


def exchange(sums: Sequence[Any]) -> list[list[Tensor]]:
    for each in sums:
        each.launch()
    for each in sums:
        each.reduce()
    return [[v.clone() for v in each.result()] for each in sums]


def tree_sum(gradients: Gradients, shards: list[range]) -> list[list[Tensor]]:
    """Every rank's result for the shards' `gradients`; rank r has `shards[r]`, of which those with gradients are filled."""

    def dealt(num_filled: int) -> list[range]:
        return [range(each.start, min(each.stop, num_filled)) for each in shards]

    with wire(len(shards)):
        bucket = bucket_of(gradients, len(shards))
        layouts = [Layouts(dealt, rank, len(shards)) for rank in range(len(shards))]
        sums = [TreeSum(bucket, 0, layout, Scratch()) for layout in layouts]
        for each, mine in zip(sums, shards, strict=True):
            each.begin(len(gradients))
            for shard in mine:
                if shard < len(gradients):
                    each.leaf(shard, copies(gradients[shard]))
        return exchange(sums)


def bin_sum(gradients: Gradients, owners: list[list[int]], units: Units) -> tuple[list[list[Tensor]], list[float]]:
    """Every rank's result, and the largest magnitudes; rank r adds the shards `owners[r]` in the order given."""
    with wire(len(owners)):
        bucket = bucket_of(gradients, len(owners))
        sums = [BinSum(bucket, 0, rank, len(owners), units, Scratch()) for rank in range(len(owners))]
        for each, mine in zip(sums, owners, strict=True):
            each.begin(len(gradients))
            for shard in mine:
                each.leaf(shard, copies(gradients[shard]))
        largest = torch.stack([each.largest for each in sums]).nan_to_num(nan=torch.inf, posinf=torch.inf).amax(0).tolist()
        return exchange(sums), largest


def settled_bin_sum(gradients: Gradients, owners: list[list[int]], units: Units) -> list[list[Tensor]]:
    """As a step does it: run again until the units fit."""
    for _ in range(4):
        units_now = list(units.exponents)
        results, largest = bin_sum(gradients, owners, units)
        if units.check(largest):
            return results
    raise AssertionError(f"no unit fits: {units_now}")


def bits(tensors: Sequence[Tensor]) -> list[bytes]:
    return [t.contiguous().numpy().tobytes() for t in tensors]
