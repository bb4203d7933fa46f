"""Group `precision`: apex's ladder on plain torch.

Each class answers three questions: in which dtype do the weights of the working copy live (`cast`), what is autocast
(`autocast`), and is the loss scaled (`scaler`). Levels with master weights keep the model itself in fp32 and compute on a
half copy of it; optimizer, EMA, clipping and checkpoints only ever see the model itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.checks import choice, positive
from isobatch.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Full:
    """fp32 (apex O0); `tf32` lets CUDA matmuls and convolutions round their inputs to tf32."""

    name: str = "fp32"
    tf32: bool = False

    def setup(self) -> None:
        """Set torch's matmul precision for this process: said explicitly, so that no earlier job's setting leaks in."""
        _set_tf32(self.tf32)

    def autocast(self, device: torch.device) -> AbstractContextManager:
        return nullcontext()

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        return _scaler(device, None)

    def working_copy(self, model: nn.Module) -> WorkingCopy:
        return SameModel(model)

    def describe(self, device: torch.device) -> str:
        return "tf32 matmuls" if self.tf32 else "fp32"


@dataclass(frozen=True)
class Autocast(Full):
    """amp (apex O1) and bf16: fp32 weights, torch.autocast around the forward.

    `dtype=auto` is fp16 with a dynamic loss scale on CUDA, bf16 without one elsewhere (fp16 on a CPU is ~25x slower).
    """

    name: str = "amp"
    dtype: str = "auto"
    loss_scale: Any = 65536.0  # initial; null = no scaler
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    cache_enabled: bool = True

    def __post_init__(self) -> None:
        choice("precision.dtype", self.dtype, ("auto", "float16", "bfloat16"))
        _check_scale(self)

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        import torch

        if self.dtype == "auto":
            return torch.float16 if device.type == "cuda" else torch.bfloat16
        return getattr(torch, self.dtype)

    def autocast(self, device: torch.device) -> AbstractContextManager:
        import torch

        return torch.autocast(device.type, dtype=self.compute_dtype(device), cache_enabled=self.cache_enabled)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        import torch

        return _scaler(device, self if self.compute_dtype(device) == torch.float16 else None)

    def describe(self, device: torch.device) -> str:
        dtype = str(self.compute_dtype(device)).removeprefix("torch.")
        scaled = self.scaler(device).is_enabled()
        return f"{dtype} autocast, " + (f"dynamic loss scale from {self.loss_scale:g}" if scaled else "no loss scale")


def _scaler(device: torch.device, options: Any) -> torch.amp.GradScaler:
    import torch

    if options is None or options.loss_scale is None:
        return torch.amp.GradScaler(device.type, enabled=False)
    return torch.amp.GradScaler(
        device.type,
        init_scale=float(options.loss_scale),
        growth_factor=options.growth_factor,
        backoff_factor=options.backoff_factor,
        growth_interval=options.growth_interval,
    )


def _check_scale(options: Any) -> None:
    scale = options.loss_scale
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise ConfigError("precision.loss_scale", scale, "is not a number", "set precision.loss_scale=65536 or null")
    if scale is not None:
        positive("precision.loss_scale", scale)
    positive("precision.growth_interval", options.growth_interval)
    if options.growth_factor <= 1 or not 0 < options.backoff_factor < 1:
        raise ConfigError("precision.growth_factor", options.growth_factor,
                          f"growth must be above 1 and backoff ({options.backoff_factor}) between 0 and 1",
                          "set precision.growth_factor=2 precision.backoff_factor=0.5")  # fmt: skip


def _set_tf32(enabled: bool) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = enabled
    torch.backends.cudnn.allow_tf32 = enabled


class WorkingCopy:
    """What the forward runs on (`module`), beside the model that optimizer, EMA and checkpoints see."""

    module: nn.Module

    def pull_gradients(self) -> None:
        """Hand the window's gradients over to the model's parameters."""

    def push_weights(self) -> None:
        """Bring the working weights up to date after an update."""


class SameModel(WorkingCopy):
    """No copy: the forward runs on the model itself."""

    def __init__(self, model: nn.Module):
        self.module = model


TABLE: dict[str, Any] = {"full": Full, "autocast": Autocast}
