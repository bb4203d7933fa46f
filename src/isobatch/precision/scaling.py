"""The loss scale: torch.amp.GradScaler's rule with the decision on the host, where the step needs it anyway."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from isobatch.errors import JobFailed
from isobatch.runtime.randomness import has_step_hooks

PATIENCE = 100  # updates withheld in a row under a static scale, which has no other way to give up


class LossScaler:
    """Multiplies the loss, divides the gradients once per window, and withholds an update that is not finite.

    torch's GradScaler keeps the scale on the device, and whoever has to know whether an update was applied (schedule,
    EMA and batch norm do) reads it back twice a step. Here the one flag "not finite" is read, once a step and only
    where a loss is scaled; the scale itself is a Python number. Gradients are reduced before they are looked at, so all
    ranks read the same flag.

    Args:
        initial: the scale to start with; None = no scaling (everything passes, nothing is read back).
        growth_factor, growth_interval: the scale is multiplied after so many good updates in a row.
        backoff_factor: what it is multiplied with when an update is withheld.
        minimum: an update withheld at this scale is given up on.
        dynamic: False = the scale stays as it is; updates that are not finite are withheld all the same.
    """

    def __init__(self, initial: float | None, growth_factor: float = 2.0, backoff_factor: float = 0.5,
                 growth_interval: int = 2000, minimum: float = 1.0, dynamic: bool = True):  # fmt: skip
        self.value, self.enabled = 1.0 if initial is None else float(initial), initial is not None
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.minimum, self.dynamic = minimum, dynamic
        self.good_updates = self.withheld_in_a_row = 0
        self._not_finite: list[Tensor] = []

    def is_enabled(self) -> bool:
        return self.enabled

    def get_scale(self) -> float:
        """The scale, without waiting for the device; 1.0 without scaling."""
        return self.value

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value if self.enabled else loss

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients that `optimizer` will see by the scale, in place, and look for what is not finite."""
        if not self.enabled:
            return
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    groups.setdefault((p.grad.device, p.grad.dtype), []).append(p.grad)
        self._not_finite = []
        for (device, _), grads in groups.items():
            flag = torch.zeros((), device=device)
            inverse = torch.full((), 1.0 / self.value, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse)
            self._not_finite.append(flag)

    def step(self, optimizer: torch.optim.Optimizer, withhold: bool = False) -> bool:
        """Apply the update unless a gradient is not finite or `withhold`, and move the scale. Returns whether it did.

        Raises:
            JobFailed: withheld although the scale is at its minimum (or too often in a row): scaling cannot help.
        """
        overflow = any([flag.item() != 0 for flag in self._not_finite])  # noqa: C419  # read all: none stays behind
        self._not_finite = []
        applied = not (overflow or withhold)
        if applied:
            update(optimizer)
        if self.enabled:
            self._move(applied)
        return applied

    def _move(self, applied: bool) -> None:
        """torch._amp_update_scale_ on the host."""
        if applied:
            self.withheld_in_a_row = 0
            self.good_updates += 1
            if self.good_updates >= self.growth_interval:
                self.good_updates = 0
                if self.dynamic and math.isfinite(self.value * self.growth_factor):
                    self.value *= self.growth_factor
            return
        self.good_updates = 0
        self.withheld_in_a_row += 1
        lower = self.value * self.backoff_factor
        if (lower < self.minimum) if self.dynamic else (self.withheld_in_a_row >= PATIENCE):
            raise JobFailed(
                f"the loss scale is {self.value:g} (precision.min_loss_scale={self.minimum:g}) and gradients are still "
                f"not finite after {self.withheld_in_a_row} withheld updates in a row: no scale can help; lower "
                "optimizer.lr, set max_grad_norm, look at the data, or take the range of fp32 with precision=bf16"
            )
        if self.dynamic:
            self.value = lower

    def state_dict(self) -> dict[str, Any]:
        """The scale and its growth counter, under torch's names; {} without scaling."""
        return {"scale": self.value, "_growth_tracker": self.good_updates} if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the saved scale; the options (growth, backoff) stay those of the config."""
        if not self.enabled:
            return
        if not state:
            return
        if self.dynamic:
            self.value = float(state["scale"])
        self.good_updates = int(state["_growth_tracker"])


def update(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, without the profiler's range that torch puts around it where there is nobody to see it: opening and
    closing it takes a tenth of a small model's step.
    """
    step = type(optimizer).step
    alone = getattr(step, "hooked", False) and "step" not in vars(optimizer) and not has_step_hooks(optimizer)
    if alone and not torch.autograd._profiler_enabled():
        step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    else:
        optimizer.step()
