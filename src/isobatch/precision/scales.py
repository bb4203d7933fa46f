"""What may be typed for the loss scale, and how the plan states it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

from isobatch.checks import positive
from isobatch.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from isobatch.precision.scaling import LossScaler

INITIAL_SCALE = 65536.0
SCALE = "loss_scale"


class Scaled(Protocol):
    """A level that may scale its loss; see Autocast for what the options mean."""

    @property
    def dtype(self) -> str: ...

    @property
    def loss_scale(self) -> Any: ...

    @property
    def growth_factor(self) -> float: ...

    @property
    def backoff_factor(self) -> float: ...

    @property
    def growth_interval(self) -> int: ...

    @property
    def min_loss_scale(self) -> float: ...

    def scaler(self, device: torch.device) -> LossScaler: ...


def parse_scale(value: Any) -> tuple[float | None, bool]:
    """(initial loss scale or None, dynamic) of `auto`, a number, `static:<number>` or null."""
    if value is None:
        return None, False
    if value == "auto":
        return INITIAL_SCALE, True
    match = re.fullmatch(r"static:(.+)", value) if isinstance(value, str) else None
    try:
        if isinstance(value, bool) or (isinstance(value, str) and not match):
            raise ValueError
        scale = float(match[1] if match else value)
    except ValueError:
        raise ConfigError(f"precision.{SCALE}", value, "is no loss scale",
                          "set it to 65536 (dynamic from there), static:1024, auto or null") from None  # fmt: skip
    if not 0 < scale < float("inf"):
        raise ConfigError(f"precision.{SCALE}", value, "must be positive and finite", "set precision.loss_scale=65536")
    return scale, match is None


def check_scale(options: Scaled) -> None:
    """Raise ConfigError unless the options of the loss scale make sense, alone and together."""
    initial, dynamic = parse_scale(options.loss_scale)
    positive("precision.min_loss_scale", options.min_loss_scale)
    positive("precision.growth_interval", options.growth_interval)
    if not options.growth_factor > 1 or not 0 < options.backoff_factor < 1:
        raise ConfigError("precision.growth_factor", options.growth_factor,
                          f"growth must be above 1 and backoff ({options.backoff_factor}) between 0 and 1",
                          "set precision.growth_factor=2 precision.backoff_factor=0.5")  # fmt: skip
    if initial is not None and dynamic and initial < options.min_loss_scale:
        raise ConfigError(f"precision.{SCALE}", options.loss_scale,
                          f"is below precision.min_loss_scale={options.min_loss_scale:g}",
                          "raise the one or lower the other")  # fmt: skip
    if options.dtype == "bfloat16" and options.loss_scale not in (None, "auto"):
        raise ConfigError(f"precision.{SCALE}", options.loss_scale,
                          "bf16 has the range of fp32: its gradients do not underflow, and no scaler is used",
                          "set precision.loss_scale=null, or precision.dtype=float16")  # fmt: skip


def describe_scale(options: Scaled, device: torch.device) -> str:
    """The loss scale as the plan states it."""
    scaler = options.scaler(device)
    if not scaler.is_enabled():
        return "no loss scale"
    return f"dynamic loss scale from {scaler.value:g}" if scaler.dynamic else f"loss scale {scaler.value:g}"
