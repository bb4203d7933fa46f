"""Histograms of parameters and of their gradients, made where the tensors are and sent as a few numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

BINS = 48


def histograms(model: nn.Module, what: str) -> dict[str, tuple[list[int], list[float]]]:
    """`gradients/<parameter>` and `weights/<parameter>` -> (counts, BINS + 1 edges), as `what` (or `all`) asks.

    Gradients are those of the whole window, unscaled and clipped: what the optimizer saw.
    """
    found = {}
    for name, parameter in model.named_parameters():
        if what in ("gradients", "all") and parameter.grad is not None:
            found[f"gradients/{name}"] = histogram(parameter.grad)
        if what in ("weights", "all"):
            found[f"weights/{name}"] = histogram(parameter)
    return found


def histogram(tensor: Tensor) -> tuple[list[int], list[float]]:
    """Counts and edges of the finite entries."""
    import torch

    values = tensor.detach()
    if hasattr(values, "to_local"):  # a sharded tensor: this rank's share, since the others do not take part here
        values = values.to_local()
    values = values.float().reshape(-1)
    values = values[torch.isfinite(values)]
    if not len(values):
        return [0] * BINS, torch.linspace(-0.5, 0.5, BINS + 1).tolist()
    low, high = values.aminmax()
    if low == high:
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(values, BINS, low.item(), high.item())
    return [int(n) for n in counts.tolist()], torch.linspace(low.item(), high.item(), BINS + 1).tolist()
