"""Group `scheduler`: the learning rate as a pure function of `update`, so a resume needs no scheduler state.

Each class gives `factor(update, total)`: what the learning rate is multiplied with for that update (0-based) of a run of
`total` updates. The total is known before training from the dataset's size and the effective batch alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from isobatch.checks import positive, within
from isobatch.marks import Marks


class Factors(Protocol):
    """The options of group `scheduler`."""

    @property
    def name(self) -> str: ...

    def factor(self, update: int, total: int) -> float: ...


@dataclass(frozen=True)
class Constant:
    name: str = "constant"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        within("scheduler.warmup", self.warmup, 0, 1e12)

    def factor(self, update: int, total: int) -> float:
        return _warmup(update, self.warmup, total)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from 1 to `final` over what follows the warmup (Loshchilov and Hutter 2017, one cycle).

    Args:
        warmup: updates of linear warmup; below 1 a fraction of the run.
        final: the factor that the cosine ends on.
        per_epoch: hold the factor within an epoch.
    """

    name: str = "cosine"
    warmup: float = 0.0
    final: float = 0.0
    per_epoch: bool = False

    def __post_init__(self) -> None:
        within("scheduler.warmup", self.warmup, 0, 1e12)
        within("scheduler.final", self.final, 0, 1)

    def factor(self, update: int, total: int) -> float:
        start = _updates(self.warmup, total)
        if update < start:
            return _warmup(update, self.warmup, total)
        part = min(1.0, (update - start) / max(1, total - start))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * part))


@dataclass(frozen=True)
class OneCycle:
    """Up from 1/`div` to 1 during `peak` of the run, down to 1/(`div` * `final_div`) (Smith and Topin 2018).

    Both halves are cosines, as torch.optim.lr_scheduler.OneCycleLR's default; momentum is left alone.
    """

    name: str = "onecycle"
    peak: float = 0.3
    div: float = 25.0
    final_div: float = 1e4
    per_epoch: bool = False

    def __post_init__(self) -> None:
        within("scheduler.peak", self.peak, 0, 1)
        positive("scheduler.div", self.div)
        positive("scheduler.final_div", self.final_div)

    def factor(self, update: int, total: int) -> float:
        top = self.peak * total - 1
        last = total - 1
        if update <= top:
            return _between(1 / self.div, 1.0, update / top if top > 0 else 1.0)
        return _between(1.0, 1 / (self.div * self.final_div), min(1.0, (update - top) / max(1.0, last - top)))


@dataclass(frozen=True)
class Step:
    """Multiplied with `gamma` at each of `at`: fractions of the run when below 1, else updates."""

    name: str = "step"
    at: list[float] = field(default_factory=lambda: [0.5, 0.75])
    gamma: float = 0.1
    warmup: float = 0.0
    per_epoch: bool = False

    def __post_init__(self) -> None:
        within("scheduler.gamma", self.gamma, 0, 1e3)
        within("scheduler.warmup", self.warmup, 0, 1e12)

    def factor(self, update: int, total: int) -> float:
        drops = sum(update >= _updates(point, total) for point in self.at)
        return _warmup(update, self.warmup, total) * self.gamma**drops


class Schedule:
    """`schedule(update)` -> factor of a run of `total` updates."""

    def __init__(self, options: Any, total: int, updates_per_epoch: int):
        self.options, self.total = options, total
        self.hold = updates_per_epoch if getattr(options, "per_epoch", False) else 1

    def __call__(self, update: int) -> float:
        factor: float = self.options.factor(update - update % self.hold, self.total)
        return factor


def _updates(amount: float, total: int) -> int:
    return round(amount * total) if amount < 1 else int(amount)


def _warmup(update: int, warmup: float, total: int) -> float:
    """Linear: the first update has 1/n, the n-th 1."""
    n = _updates(warmup, total)
    return (update + 1) / n if update < n else 1.0


def _between(a: float, b: float, part: float) -> float:
    return b + (a - b) * 0.5 * (1 + math.cos(math.pi * part))


TABLE: dict[str, Any] = {"constant": Constant, "cosine": Cosine, "onecycle": OneCycle, "step": Step}
MARKS = Marks()
