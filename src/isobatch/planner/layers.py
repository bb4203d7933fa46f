"""`model.table=true`: the layers of a network, what each gives, holds and costs, by running two samples through a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from isobatch.planner.trial import Trial

HEAD = ("layer", "kind", "output", "weights", "trained", "MFLOP")
SAMPLES = 2  # batch norm wants more than one


def rows(trial: Trial) -> list[tuple[str, ...]]:
    """A row per layer that has no layers in it, in the order in which they run, and one with the sums; see HEAD.

    Operations are of a forward of one sample, a multiplication and an addition being two.
    """
    network = trial.working.module
    ran: dict[str, Any] = {}
    hooks = [module.register_forward_hook(lambda _, given, output, name=name: ran.setdefault(name, output))  # type: ignore[misc]
             for name, module in network.named_modules() if name and not list(module.children())]  # fmt: skip
    try:
        with FlopCounterMode(display=False) as counted:
            trial.forward(SAMPLES)
    finally:
        for hook in hooks:
            hook.remove()
    flops = {name: sum(kinds.values()) / SAMPLES for name, kinds in counted.get_flop_counts().items()}
    root, modules = type(network).__name__, dict(network.named_modules())
    found = [_row(name, modules[name], shape_of(output), flops.get(f"{root}.{name}", 0.0)) for name, output in ran.items()]
    return [*found, _row("in all", network, "", counted.get_total_flops() / SAMPLES)]


def shape_of(output: Any) -> str:
    """Of one sample; what is no tensor is named by its kind."""
    return " x ".join(map(str, output.shape[1:])) if isinstance(output, Tensor) else type(output).__name__


def _row(name: str, module: nn.Module, output: str, flops: float) -> tuple[str, ...]:
    weights = [p for p in module.parameters() if not isinstance(p, torch.nn.parameter.UninitializedParameter)]
    return (name, type(module).__name__, output, f"{sum(p.numel() for p in weights):,}",
            f"{sum(p.numel() for p in weights if p.requires_grad):,}", f"{flops / 1e6:,.3f}")  # fmt: skip
