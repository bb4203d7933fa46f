"""What replicas send each other in one window, as a strategy states it, for the planner's cost model.

No torch: the config reads this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MB = 2**20


class Ring(NamedTuple):
    """Once around a ring: a reduce-scatter or an all-gather of `nbytes` (all ranks' parts together) over `ranks`, each of
    which sends ranks - 1 messages in a row, once for each of `pieces` (Thakur, Rabenseifner and Gropp 2005).

    An all-reduce is one of each (Patarasuk and Yuan 2009).
    """

    nbytes: int
    ranks: int
    pieces: int = 1


class Exchange(NamedTuple):
    """The rings that run beside the forward and beside the backward of one micro step."""

    forward: tuple[Ring, ...] = ()
    backward: tuple[Ring, ...] = ()


@dataclass(frozen=True)
class WholeGradients:
    """Every replica has all weights: one all-reduce a window, beside its last backward. `gradients`: bytes of all."""

    gradients: int

    def describe(self) -> str:
        return f"one all-reduce of {self.gradients / MB:,.1f} MB a window"

    def window(self, replicas: int, steps: int) -> list[Exchange]:
        """For each of the window's `steps` micro steps."""
        return [Exchange()] * (steps - 1) + [Exchange(backward=(Ring(self.gradients, replicas),) * 2)]


@dataclass(frozen=True)
class WeightsInParts:
    """Weights are in parts on `shard_size` replicas (None: on all), of which there are several copies where it is smaller.

    Args:
        gradients: bytes of all gradients as they are sent.
        weights: bytes of all weights as they are gathered, in `pieces`.
        again: bytes of those that are gathered for the backward too, in `again_pieces`.
        every_gather, every_reduce: in each micro step; False: once a window.
    """

    gradients: int
    weights: int
    pieces: int
    again: int = 0
    again_pieces: int = 0
    shard_size: int | None = None
    every_gather: bool = True
    every_reduce: bool = True

    def describe(self) -> str:
        every = {True: "each micro step", False: "once a window"}
        again = f" ({self.again / MB:,.1f} MB of them twice)" if self.again else ""
        return (f"an all-gather of {self.weights / MB:,.1f} MB weights {every[self.every_gather]}{again} and a "
                f"reduce-scatter of {self.gradients / MB:,.1f} MB gradients {every[self.every_reduce]}")  # fmt: skip

    def window(self, replicas: int, steps: int) -> list[Exchange]:
        """For each of the window's `steps` micro steps. Replicas that `shard_size` does not divide count as one copy."""
        size = self.shard_size or replicas
        size = replicas if replicas % size else size
        gather = (Ring(self.weights, size, self.pieces),)
        gather_again = (Ring(self.again, size, self.again_pieces),) if self.again else ()
        reduce: tuple[Ring, ...] = (Ring(self.gradients, size, self.pieces),)
        if size < replicas:  # the parts of one place are added over the copies
            reduce += (Ring(-(-self.gradients // size), replicas // size, self.pieces),) * 2
        return [
            Exchange(gather if self.every_gather or i == 0 else (),
                     gather_again + (reduce if self.every_reduce or i == steps - 1 else ()))
            for i in range(steps)
        ]  # fmt: skip
