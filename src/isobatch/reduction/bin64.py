"""`bin64`: one float64 per element, so wide that a sum of rounded gradients is exact in every order.

Each tensor has a unit u, a power of two. An accumulator starts at 1.5 * 2^52 * u, where one unit is its last place, so the
hardware rounds what is added to a multiple of u. With |g| <= 2^CAP * u for every shard, all partial sums are whole
numbers of units below 2^51: nothing is ever rounded again, and grouping and order cannot matter. Adding g * (1 + 2^-50)
instead of g breaks ties away from zero; by themselves they would go to the even neighbour of the sum so far, which depends
on the order. docs/exact-reduction.md has the proof and its limits.

The unit is predicted from the window before, and checked by the largest gradient of any shard on any rank; a miss makes
every plan run the window once more with the unit it asks for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from isobatch.reduction.buckets import Bucket, in_memory_order
from isobatch.reduction.exchange import Scratch, keeps_own, sum_at_owners, to_everybody, to_owners

TIE_BREAK = 1 + 2.0**-50
CHUNK = 32768  # elements: a float64 chunk and what it is added to stay in the cache
GROWTH = 8  # bits that a tensor's largest gradient may grow from one window to the next without a second run
FALL = 12  # and bits that it may fall: below, the sum would keep too few of its bits
LOWEST, HIGHEST = -1070, 960  # exponents of units whose offset is a normal float64


def offset(exponent: int) -> float:
    return 1.5 * math.ldexp(1.0, 52 + exponent)


class Units:
    """The exponents of the tensors' units: predicted, checked, and part of a checkpoint.

    Args:
        num_tensors: of the reducer. num_shards: V; the sum of V gradients has to fit too.
    """

    def __init__(self, num_tensors: int, num_shards: int):
        self.cap = min(48, 51 - math.ceil(math.log2(num_shards)))
        self.exponents = [self.wanted(2.0**-10)] * num_tensors  # a first guess, corrected by the first window
        self.careful = False
        self.reruns = 0
        self.overflowed: frozenset[int] = frozenset()

    def wanted(self, largest: float) -> int:
        """The exponent for a tensor whose largest gradient is `largest` > 0."""
        return min(HIGHEST, max(LOWEST, math.frexp(largest)[1] + GROWTH - self.cap))

    def check(self, largest: list[float]) -> bool:
        """Judge a window and set the exponents of the next run; False = run this window once more.

        A second run always fits, one more may come before it to look past values that are not finite.

        Args:
            largest: |gradient| of each tensor over all shards of all ranks, -1 where there was none. Infinite where
                any was not finite, unless `careful`: then those are left out.
        """
        if not all(map(math.isfinite, largest)):
            # what is finite has to be right all the same, and equal on every plan: measure that alone
            self.careful = True
            self.reruns += 1
            return False
        wanted = [self.wanted(v) if v > 0 else e for v, e in zip(largest, self.exponents, strict=True)]
        fits = all(-FALL <= w - e <= GROWTH for w, e in zip(wanted, self.exponents, strict=True))
        self.exponents = wanted
        if not fits:
            self.reruns += 1
            return False
        self.careful = False
        self.overflowed = frozenset(i for i, v in enumerate(largest) if math.frexp(v)[1] - self.cap > HIGHEST)
        return True


class BinSum:
    """The sum of one bucket: `begin`, `leaf` for every shard of this rank, `launch`, `reduce`, `result`."""

    def __init__(self, bucket: Bucket, index: int, rank: int, num_ranks: int, units: Units, scratch: Scratch):
        self.bucket, self.index, self.units, self.scratch = bucket, index, units, scratch
        self.rank, self.num_ranks = rank, num_ranks
        self.sum = torch.zeros(bucket.padded, dtype=torch.float64, device=bucket.device)
        self.parts = bucket.flat_views(self.sum)
        # the result lies in the accumulator's own memory, of which it needs half
        self.full = self.sum.view(bucket.dtype)[: bucket.padded]
        self.views = bucket.views(self.full)
        self.largest = torch.zeros(len(bucket.ids), dtype=torch.float64, device=bucket.device)
        self.work: Any = None

    def begin(self, num_filled: int) -> None:
        self.offsets = [offset(self.units.exponents[i]) for i in self.bucket.ids]
        self.sum.zero_()
        torch._foreach_add_(self.parts, self.offsets)
        self.largest.fill_(-1.0)

    def leaf(self, shard: int, gradients: list[Tensor | None]) -> None:
        """Add the gradients of one shard."""
        present = [i for i, g in enumerate(gradients) if g is not None]
        if not present:
            return
        values = [in_memory_order(gradients[i], self.bucket.strides[i]) for i in present]  # type: ignore[arg-type]
        if self.bucket.device.type != "cpu" and self.bucket.dtype != torch.float64:
            self._leaf_at_once(present, values)
            return
        found = self._largest(values)
        if len(present) == len(gradients):
            torch.maximum(self.largest, found, out=self.largest)  # a NaN stays
        else:
            index = torch.tensor(present, device=found.device)
            self.largest.index_copy_(0, index, torch.maximum(self.largest[index], found))
        for i, value in zip(present, values, strict=True):
            self._add(self.parts[i], value, self.offsets[i])

    def _leaf_at_once(self, present: list[int], values: list[Tensor]) -> None:
        """The same through one flat tensor, in a handful of kernels, where each one costs a launch."""
        size, absent = self.bucket.size, len(present) < len(self.parts)
        flat = self.scratch.take("flat", 0, size, self.bucket.dtype, self.bucket.device)
        if absent:
            flat.zero_()
        parts = self.bucket.flat_views(flat)
        torch._foreach_copy_([parts[i] for i in present], values)
        looked_at = self.bucket.flat_views(flat.nan_to_num(0.0, 0.0, 0.0)) if self.units.careful else parts
        norms = list(torch._foreach_norm([looked_at[i] for i in present], math.inf))
        if absent:
            none = torch.full_like(norms[0], -1.0)
            found = dict(zip(present, norms, strict=True))
            norms = [found.get(i, none) for i in range(len(parts))]
        torch.maximum(self.largest, torch.stack(norms).double(), out=self.largest)  # a NaN stays
        self.sum[:size].add_(flat, alpha=TIE_BREAK)

    def _largest(self, values: list[Tensor]) -> Tensor:
        """(len(values),) float64: the largest magnitude of each; NaN where there is one, unless careful."""
        if self.units.careful:
            values = [v.nan_to_num(0.0, 0.0, 0.0) for v in values]
        ends = [torch.aminmax(v) for v in values]
        return torch.stack([torch.maximum(-low, high) for low, high in ends]).double()

    def _add(self, part: Tensor, value: Tensor, start: float) -> None:
        """part += value, rounded to the unit by a function of `value` alone."""
        if value.device.type != "cpu" and value.dtype != torch.float64:
            part.add_(value, alpha=TIE_BREAK)
            return
        # on a CPU a mixed-dtype add is slow, and a float64 copy of the whole gradient would leave the cache
        chunk = self.scratch.take("chunk", 0, CHUNK, torch.float64, value.device)
        for begin in range(0, value.numel(), CHUNK):
            source = value[begin : begin + CHUNK]
            wide = chunk[: source.numel()].copy_(source)
            if value.dtype == torch.float64:  # too many bits for the tie-break: rounded by the offset itself beforehand
                part[begin : begin + CHUNK].add_(wide.add_(start).sub_(start))
            else:
                part[begin : begin + CHUNK].add_(wide, alpha=TIE_BREAK)

    def launch(self) -> None:
        """Take the offsets off, which leaves whole numbers of units, and send every owner its share."""
        torch._foreach_sub_(self.parts, self.offsets)
        if self.num_ranks == 1:
            return
        share = self.bucket.padded // self.num_ranks
        if keeps_own(self.bucket.device):  # gloo's reduce-scatter is an all-reduce inside, and moves 20 bytes for 12
            sizes = [share * (rank != self.rank) for rank in range(self.num_ranks)]
            self.received = self._scratch(sum(sizes))
            self.work = to_owners(self.received, self.sum, sizes, share)
        else:
            self.received = self._scratch(share)
            self.work = sum_at_owners(self.received, self.sum)

    def reduce(self) -> None:
        """Add up this rank's share, round it once, and start handing the result round."""
        if self.num_ranks == 1:
            self._round_in_place()
            return
        self.work.wait()
        share = self.bucket.padded // self.num_ranks
        own = slice(self.rank * share, (self.rank + 1) * share)
        total, *others = self.received.split(share)
        if keeps_own(self.bucket.device):
            others.append(self.sum[own])
        for other in others:
            total.add_(other)
        self.work = to_everybody(self.full, self.full[own].copy_(total))

    def _round_in_place(self) -> None:
        """float64 -> the result's dtype within the same memory, front to back, so that nothing unread is overwritten."""
        if self.full.dtype == torch.float64:
            return
        step = CHUNK if self.sum.device.type == "cpu" else max(1, self.sum.numel())
        for begin in range(0, self.sum.numel(), step):
            source = self.sum[begin : begin + step]
            self.full[begin : begin + source.numel()].copy_(source.to(self.full.dtype))

    def result(self) -> list[Tensor | None]:
        """The sums, shaped as the tensors; where all ranks' gradients were None the value means nothing."""
        if self.num_ranks > 1:
            self.work.wait()
        for i, view in zip(self.bucket.ids, self.views, strict=True):
            if i in self.units.overflowed:
                view.fill_(math.inf)
        return list(self.views)

    def _scratch(self, size: int) -> Tensor:
        return self.scratch.take("received", self.index, size, torch.float64, self.bucket.device)
