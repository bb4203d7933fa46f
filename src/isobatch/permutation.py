"""Permutations of range(n) and draws from it that are computed place by place: any part of them, in any order, alone.

A Feistel network over two digits (Black and Rogaway 2002): each round adds to one digit a hash of the other, which can be
undone, so that no two numbers meet. The digits hold a few more numbers than n (two square roots of it); those that fall there
go through again. Integers alone, so every machine gives the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import isqrt
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ROUNDS = 12
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64
UNIT = 2.0**-53


def keys(seed: int, epoch: int, count: int) -> list[Any]:
    """`count` numbers (uint64) of their own for each seed and epoch."""
    import numpy

    return list(numpy.random.SeedSequence([seed % 2**64, epoch]).generate_state(count, numpy.uint64))


def mixed(numbers: Any, key: Any) -> Any:
    """(k,) uint64 -> (k,) uint64, each as if drawn."""
    import numpy

    found = numbers + key  # wraps, as do the products
    for shift, factor in zip((30, 27), MIX, strict=True):
        found ^= found >> numpy.uint64(shift)
        found *= numpy.uint64(factor)
    found ^= found >> numpy.uint64(31)
    return found


class Permutation:
    """positions (k,) uint64, each below n -> (k,) int64, each below n and no two alike."""

    def __init__(self, n: int, seed: int, epoch: int):
        import numpy

        high = isqrt(n - 1) + 1 if n > 1 else 1
        low = 2 * -(-n // (2 * high))  # with odd digits alone every other permutation would be out of reach
        self.n, self.high, self.low = numpy.uint64(n), numpy.uint64(high), numpy.uint64(low)
        self.keys = keys(seed, epoch, ROUNDS)

    def __call__(self, positions: Any) -> Any:
        import numpy

        found = self._through(positions)
        while (outside := numpy.flatnonzero(found >= self.n)).size:
            found[outside] = self._through(found[outside])
        return found.astype(numpy.int64)

    def _through(self, numbers: Any) -> Any:
        high, low = numbers // self.low, numbers % self.low
        for k in range(0, ROUNDS, 2):
            high = (high + mixed(low, self.keys[k]) % self.high) % self.high
            low = (low + mixed(high, self.keys[k + 1]) % self.low) % self.low
        return high * self.low + low


class Draws:
    """positions (k,) uint64 -> (k,) int64: a sample drawn by weights, made unlike all others by n times its position.

    Args:
        sums: (n,) float64, of the weights up to and with each.
    """

    def __init__(self, sums: Any, seed: int, epoch: int):
        self.sums = sums
        (self.key,) = keys(seed, epoch, 1)

    def __call__(self, positions: Any) -> Any:
        import numpy

        shares = (mixed(positions, self.key) >> numpy.uint64(11)).astype(numpy.float64) * UNIT
        drawn = numpy.searchsorted(self.sums, shares * self.sums[-1], side="right")
        return numpy.minimum(drawn, len(self.sums) - 1) + len(self.sums) * positions.astype(numpy.int64)


class Passes:
    """positions (k,) uint64 -> (k,) int64 of several orders one after another.

    Args:
        made: k -> the k-th of them. size: positions of each. end: no index of one is as large.
    """

    def __init__(self, made: Callable[[int], Callable[[Any], Any]], size: int, end: int):
        self.made, self.size, self.end = lru_cache(maxsize=2)(made), size, end

    def __call__(self, positions: Any) -> Any:
        import numpy

        numbers = positions // numpy.uint64(self.size)
        found = numpy.empty(len(positions), dtype=numpy.int64)
        for number in numpy.unique(numbers):
            here, k = numbers == number, int(number)
            found[here] = self.made(k)(positions[here] - number * numpy.uint64(self.size)) + k * self.end
        return found


class ComputedOrder:
    """What a slice of an epoch's order holds, when it is asked for; positions past the end go round, as `tail=pad` has them.

    Args:
        values: positions (k,) uint64 -> virtual indices (k,) int64.
        size: positions of the order. end: no virtual index is as large.
    """

    BLOCK = 1 << 14  # computed at once, because a shard alone is too small for numpy

    def __init__(self, values: Callable[[Any], Any], size: int, end: int):
        self.values, self.size, self.end = values, size, end
        self._block = lru_cache(maxsize=4)(self._computed)

    def __len__(self) -> int:
        return self.size

    def max(self) -> int:
        return self.end - 1

    def __getitem__(self, wanted: slice) -> Tensor:
        import torch

        start, stop, step = wanted.start, wanted.stop, wanted.step or 1
        parts = []
        while start < stop:
            block, place = divmod(start, self.BLOCK)
            parts.append(self._block(block)[place : place + stop - start : step])
            start += len(parts[-1]) * step
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def _computed(self, block: int) -> Tensor:
        import numpy
        import torch

        positions = numpy.arange(block * self.BLOCK, (block + 1) * self.BLOCK, dtype=numpy.uint64) % numpy.uint64(self.size)
        return torch.from_numpy(self.values(positions))
