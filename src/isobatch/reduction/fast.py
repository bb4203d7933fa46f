"""Reduction by torch's own wrappers: rounding may differ between plans, nothing else does."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from isobatch.batch_plan import BatchPlan, Window
    from isobatch.data.feed import MicroBatch
    from isobatch.distributed import Ranks


class FastReducer:
    """The protocol of a reducer, in the order of a window's life.

    `module` is what the forward goes through and `loss_factor` what the loss is multiplied with; `begin`, then for each
    micro batch `shard` (around forward and backward) and `record`, then `finish`: afterwards every parameter's gradient
    is the mean over the window on every rank. `finish` returns False when the window has to be run once more.
    """

    replays = False  # a window is never run twice, so its batches need not be kept

    def __init__(self, module: nn.Module, strategy: Any, plan: BatchPlan, ranks: Ranks, device: torch.device):
        self.strategy, self.ranks = strategy, ranks
        self.module = strategy.wrap(module, ranks, device)
        self.loss_factor: float = strategy.loss_factor(ranks)
        self.device = device

    def begin(self, window: Window) -> None:
        self.window = window
        self.loss: Tensor | None = None

    def shard(self, micro: MicroBatch) -> AbstractContextManager:
        return self.strategy.gradient_sync(self.module, micro)

    def record(self, micro: MicroBatch, weighted_loss: Tensor) -> None:
        """`weighted_loss`: 0-d, the micro batch's loss times its weight in the window."""
        loss = weighted_loss.detach()
        self.loss = loss if self.loss is None else self.loss + loss

    def finish(self) -> bool:
        if self.loss is None:
            self.module.zero_grad()  # no micro batch did it
            self.strategy.idle(self.module)
        return True

    def window_loss(self) -> Tensor:
        """Mean loss of the window over all ranks, 0-d float64 (a collective: every rank has to ask)."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device) if self.loss is None else self.loss.double()
        return self.ranks.all_reduce(loss)

    def mean_buffers(self, sums: Tensor) -> Tensor:
        """Mean over the window's filled shards; `sums` (n,) is this rank's sum over its own. A collective."""
        return self.ranks.all_reduce(sums) / self.window.num_filled

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
