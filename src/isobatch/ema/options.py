"""What group `ema` offers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from isobatch.amounts import amount
from isobatch.checks import within
from isobatch.errors import ConfigError
from isobatch.marks import Marks, option

if TYPE_CHECKING:
    from torch import nn


class EmaOptions(Protocol):
    @property
    def name(self) -> str: ...

    def build(self, model: nn.Module) -> Any:
        """timm's ModelEmaV3 of `model`, or None."""

    def note(self, updates: int) -> str | None:
        """What a person should know of this average in a run of so many updates."""


@dataclass(frozen=True)
class NoEma:
    name: str = "none"

    def note(self, updates: int) -> None:
        return None

    def build(self, model: nn.Module) -> None:
        return None


@dataclass(frozen=True)
class Ema:
    """Weights are averaged, buffers copied: averaged batch-norm statistics would lag behind averaged weights.

    Args:
        decay: of the average, per update.
        warmup: let the decay grow with (1 + update)^-(2/3) first, so that early weights are forgotten.
        device: null = the model's; `cpu` saves device memory and costs a copy per update; an evaluation takes a copy back.
    """

    name: str = "ema"
    decay: float = 0.999
    warmup: bool = True
    device: str | None = option(None, resume="identity")

    def __post_init__(self) -> None:
        within("ema.decay", self.decay, 0, 1)
        if self.device is not None and not re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", self.device):
            raise ConfigError("ema.device", self.device, "is no device", "set ema.device=null or cpu")

    def note(self, updates: int) -> str | None:
        """What a person should know of this average in a run of so many updates."""
        memory = round(1 / (1 - self.decay)) if self.decay < 1 else updates + 1
        if memory <= updates:
            return None
        return (f"ema.decay={self.decay:g} averages over {'all' if self.decay >= 1 else f'about {memory}'} updates, more than "
                f"the {updates} of this run: its first weights still count at the end; lower ema.decay")  # fmt: skip

    def build(self, model: nn.Module) -> Any:
        import torch

        from isobatch.ema.average import Average, DistantAverage

        # in half (O3) an average with decay 0.999 would stand still: a thousandth is below the resolution
        half = any(p.dtype.itemsize == 2 for p in model.parameters())
        average = Average(model, decay=self.decay, use_warmup=self.warmup, exclude_buffers=True,
                          dtype=torch.float32 if half else None)  # fmt: skip
        device, home = torch.device(self.device or "cpu"), next(model.parameters()).device
        if self.device is None or device == home or (device.type == home.type and device.index is None):
            return average
        if device.type not in ("cpu", home.type):
            raise ConfigError("ema.device", self.device, f"the model is on {home}", "set ema.device=null or cpu")
        return DistantAverage(average, model, device)


@dataclass(frozen=True)
class Swa:
    """Stochastic weight averaging (Izmailov et al. 2018): the plain mean of the weights at some updates towards the end.

    Running statistics are averaged with the weights (torch's AveragedModel with use_buffers), so no pass over the data follows.

    Args:
        start: length of the run before the first one that counts; until then the average is the weights as they are.
        every: from one to the next.
    """

    amounts: ClassVar[tuple[str, ...]] = ("start", "every")

    name: str = "swa"
    start: Any = "75%"
    every: Any = "1ep"

    def __post_init__(self) -> None:
        for key in self.amounts:
            object.__setattr__(self, key, amount(f"ema.{key}", getattr(self, key)))
        if self.every == 0:
            raise ConfigError("ema.every", 0, "is no length from one to the next", "set ema.every=1ep")

    def note(self, updates: int) -> str | None:
        """Lengths are in updates by now."""
        return f"ema.start={self.start} of {updates} updates: nothing is averaged" if self.start >= updates else None

    def build(self, model: nn.Module) -> Any:
        from isobatch.ema.average import PlainMean

        return PlainMean(model, int(self.start), max(1, int(self.every)))


MARKS = Marks()
