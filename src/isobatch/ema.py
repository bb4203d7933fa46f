"""Group `ema`: an exponential moving average of the weights, counted in updates (timm's ModelEmaV3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.checks import within

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class NoEma:
    name: str = "none"

    def build(self, model: nn.Module) -> None:
        return None


@dataclass(frozen=True)
class Ema:
    """Weights are averaged, buffers copied: averaged batch-norm statistics would lag behind averaged weights.

    Args:
        decay: of the average, per update.
        warmup: let the decay grow with (1 + update)^-(2/3) first, so that early weights are forgotten.
        device: null = the model's; `cpu` saves device memory and costs a copy per update.
    """

    name: str = "ema"
    decay: float = 0.999
    warmup: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        within("ema.decay", self.decay, 0, 1)

    def build(self, model: nn.Module) -> Any:
        from timm.utils import ModelEmaV3

        device: torch.device | None = None
        if self.device is not None:
            import torch

            device = torch.device(self.device)
        return ModelEmaV3(model, decay=self.decay, use_warmup=self.warmup, device=device, exclude_buffers=True)


TABLE: dict[str, Any] = {"none": NoEma, "ema": Ema}
