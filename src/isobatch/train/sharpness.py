"""Sharpness-aware minimisation (Foret et al. 2021) as a reducer: the window is run twice, and both gradients are the window's.

The first gradient, reduced over all replicas, climbs; the second, taken there and reduced again, is what the optimizer gets.
Published versions often climb by each process's own gradient: another training for every number of processes. Here it is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from isobatch.batch_plan import Window
    from isobatch.precision.masters import WorkingCopy
    from isobatch.reduction.protocol import Reducer


class SharpnessAware:
    """A Reducer (reduction/protocol.py) around another. The second run draws what the first one did, and its statistics count.

    Args:
        rho: length of the climb. adaptive: in units of each weight's size (Kwon et al. 2021).
    """

    replays = True

    def __init__(self, inner: Reducer, working: WorkingCopy, parameters: list[nn.Parameter], rho: float, adaptive: bool):
        self.inner, self.working, self.rho, self.adaptive = inner, working, rho, adaptive
        self.parameters = parameters
        self.module, self.loss_factor = inner.module, inner.loss_factor
        self.before: list[Tensor] | None = None
        self.moved: list[nn.Parameter] = []
        self.loss: Tensor | None = None

    def __getattr__(self, name: str) -> Any:  # begin is the window's, the rest the inner one's
        return getattr(self.inner, name)

    def begin(self, window: Window, statistics: Tensor | None) -> None:
        self.inner.begin(window, statistics)

    @torch.no_grad()
    def finish(self) -> bool:
        """True after the second run. A collective."""
        if not self.inner.finish():
            return False
        if self.before is None:
            self.loss = self.inner.window_loss()
            self.working.pull_gradients()
            self._climb()
            self.working.push_weights()
            return False
        for p, value in zip(self.moved, self.before, strict=True):  # one by one: DTensor has no list of them
            p.copy_(value)
        self.working.push_weights()
        self.before = None
        return True

    def window_loss(self) -> Tensor:
        """Of the weights themselves, not of where the climb has led."""
        assert self.loss is not None
        return self.loss

    def _climb(self) -> None:
        """By rho along the gradient's direction, whatever the loss scale is."""
        self.moved = [p for p in self.parameters if p.grad is not None]
        self.before = [p.detach().clone() for p in self.moved]
        gradients: list[Tensor] = [p.grad for p in self.moved]  # type: ignore[misc]
        steps = [g * p.abs() for g, p in zip(gradients, self.moved, strict=True)] if self.adaptive else gradients
        # of half gradients in float32: as a number of its own type a norm soon is infinite
        length = torch.nn.utils.get_total_norm([s.float() if s.dtype.itemsize == 2 else s for s in steps])
        scale = self.rho / (length + 1e-12)
        for p, step in zip(self.moved, steps, strict=True):
            p.add_((step * p.abs() if self.adaptive else step) * scale)


def around(options: Any, reducer: Reducer, working: WorkingCopy, parameters: list[nn.Parameter]) -> Reducer:
    """`reducer`, or a sharpness-aware one around it where the optimizer's options ask for it."""
    rho = getattr(options, "sam", None)
    return reducer if rho is None else SharpnessAware(reducer, working, parameters, rho, options.sam_adaptive)
