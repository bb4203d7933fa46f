"""The shapes of a learning rate: each gives `factor(update, total)`, a pure function, so a resume needs no state of it.

Lengths are amounts (isobatch.amounts): updates, epochs or shares of the run; `Schedule` turns them into updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from isobatch import amounts
from isobatch.amounts import updates
from isobatch.checks import choice, positive, within
from isobatch.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    """What every schedule but `onecycle` has.

    Args:
        warmup: length of the warm-up.
        warmup_start: the factor of the first update; null: a first step of the warm-up, 1/n of n updates.
        warmup_shape: `linear`, or `constant`: `warmup_start` until the warm-up is over.
        per_epoch: hold the factor within an epoch.
    """

    amounts: ClassVar[tuple[str, ...]] = ("warmup",)  # options that are lengths

    name: str = "constant"
    warmup: Any = 0
    warmup_start: float | None = None
    warmup_shape: str = "linear"
    per_epoch: bool = False

    def __post_init__(self) -> None:
        amounts.read(self, "scheduler", ("at",))
        choice("scheduler.warmup_shape", self.warmup_shape, ("linear", "constant"))
        if self.warmup_start is not None:
            within("scheduler.warmup_start", self.warmup_start, 0, 1)
        elif self.warmup_shape == "constant":
            raise ConfigError("scheduler.warmup_start", None, "a constant warm-up needs its factor",
                              "set scheduler.warmup_start=0.01")  # fmt: skip

    def factor(self, update: int, total: int) -> float:
        return self.ramp(update, total)

    def ramp(self, update: int, total: int) -> float:
        """The factor while it warms up, then 1."""
        n = updates(self.warmup, total)
        if update >= n:
            return 1.0
        if self.warmup_start is None:  # the n-th update has 1
            return (update + 1) / n
        return self.warmup_start + (1 - self.warmup_start) * (update / n if self.warmup_shape == "linear" else 0.0)


@dataclass(frozen=True)
class Annealed(Shape):
    """Down from 1 to `final` over what follows the warm-up, along `curve`; once, or again and again.

    Args:
        final: the factor that it ends on.
        cooldown: length at the end that stays at `final`.
        cycle: length of the first cycle, after which it starts again (Loshchilov and Hutter 2017); null: one for the run.
        cycle_mul: each cycle is so many times as long as the one before.
        cycle_decay: and starts at so much of its height.
    """

    amounts = ("warmup", "cooldown", "cycle")

    final: float = 0.0
    cooldown: Any = 0
    cycle: Any = None
    cycle_mul: float = 1.0
    cycle_decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        within("scheduler.final", self.final, 0, 1)
        within("scheduler.cycle_mul", self.cycle_mul, 1, 1e3)
        within("scheduler.cycle_decay", self.cycle_decay, 0, 1)

    def factor(self, update: int, total: int) -> float:
        start = updates(self.warmup, total)
        if update < start:
            return self.ramp(update, total)
        end = total - updates(self.cooldown, total)
        height, into, length = 1.0, update - start, max(1, end - start)
        if self.cycle is not None and into < length:
            length = max(1, updates(self.cycle, total))
            if self.cycle_mul == 1:
                number, into = divmod(into, length)
            else:
                number = 0
                while into >= length:
                    into, number, length = into - length, number + 1, math.ceil(length * self.cycle_mul)
            height = self.cycle_decay**number
        return self.final + (max(height, self.final) - self.final) * self.curve(min(1.0, into / length))

    def curve(self, part: float) -> float:
        """From 1 at 0 to 0 at 1."""
        raise NotImplementedError


@dataclass(frozen=True)
class Cosine(Annealed):
    """Half a cosine."""

    name: str = "cosine"

    def curve(self, part: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * part))


@dataclass(frozen=True)
class Poly(Annealed):
    """(1 - part of the way) to the power of `power`; 1 is a straight line."""

    name: str = "poly"
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("scheduler.power", self.power)

    def curve(self, part: float) -> float:
        return float((1 - part) ** self.power)


@dataclass(frozen=True)
class Tanh(Annealed):
    """A hyperbolic tangent from `low` to `high` (Hsueh et al. 2019), as timm's: it does not quite reach 1 and `final`."""

    name: str = "tanh"
    low: float = -7.0
    high: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        within("scheduler.low", self.low, -1e3, 0)
        within("scheduler.high", self.high, 0, 1e3)

    def curve(self, part: float) -> float:
        return 0.5 * (1 - math.tanh(self.low * (1 - part) + self.high * part))


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
class Step(Shape):
    """Multiplied with `gamma` at each of `at`, or every `every`; never below `final`."""

    amounts = ("warmup", "at", "every")

    name: str = "step"
    at: list[Any] = field(default_factory=lambda: [0.5, 0.75])
    every: Any = None
    gamma: float = 0.1
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        within("scheduler.gamma", self.gamma, 0, 1e3)
        within("scheduler.final", self.final, 0, 1)

    def factor(self, update: int, total: int) -> float:
        if self.every is not None:
            drops = update // max(1, updates(self.every, total))
        else:
            drops = sum(update >= updates(point, total) for point in self.at)
        return self.ramp(update, total) * max(self.gamma**drops, self.final)


@dataclass(frozen=True)
class Wsd(Shape):
    """Warm-up, stable, decay (Hu et al. 2024): at 1 until the last `decay` of the run, then down to `final`.

    Args:
        decay_shape: `linear`, `cosine`, or `sqrt`: 1 - sqrt(part of the way) (Haegele et al. 2024).
    """

    amounts = ("warmup", "decay")

    name: str = "wsd"
    decay: Any = "20%"
    decay_shape: str = "linear"
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("scheduler.decay_shape", self.decay_shape, ("linear", "cosine", "sqrt"))
        within("scheduler.final", self.final, 0, 1)

    def factor(self, update: int, total: int) -> float:
        length = updates(self.decay, total)
        part = (update - (total - length)) / max(1, length)
        if part <= 0:
            return self.ramp(update, total)
        part = min(1.0, part)
        left = {"linear": 1 - part, "cosine": 0.5 * (1 + math.cos(math.pi * part)), "sqrt": 1 - math.sqrt(part)}
        return self.ramp(update, total) * (self.final + (1 - self.final) * left[self.decay_shape])


def _between(a: float, b: float, part: float) -> float:
    return b + (a - b) * 0.5 * (1 + math.cos(math.pi * part))
