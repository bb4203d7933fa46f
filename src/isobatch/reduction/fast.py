"""Reduction by torch's own wrappers: rounding may differ between plans, nothing else does."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isobatch.runtime.accelerator import widest

if TYPE_CHECKING:
    from isobatch.batch_plan import BatchPlan, Window
    from isobatch.data.feed import MicroBatch
    from isobatch.parallel.base import Single
    from isobatch.runtime.distributed import Ranks


class FastReducer:
    """A Reducer (protocol.py) that leaves the sums to the strategy's wrapper."""

    replays = False  # a window is never run twice, so its batches need not be kept
    empty = False

    def __init__(self, module: nn.Module, strategy: Single, plan: BatchPlan, ranks: Ranks, device: torch.device):
        self.strategy, self.ranks = strategy, ranks
        self.module = strategy.wrap(module, ranks, device)
        self.loss_factor: float = strategy.loss_factor(ranks)
        self.device, self.batch = device, plan.batch

    def begin(self, window: Window, statistics: Tensor | None) -> None:
        self.window = window
        self.loss: Tensor | None = None
        self.buffers: Tensor | None = None
        self.statistics, self.under_way = statistics, None
        self.strategy.begin(self.module, self.batch, window, self.ranks)

    def shard(self, micro: MicroBatch) -> AbstractContextManager[Any]:
        return self.strategy.gradient_sync(self.module, micro)

    def aside(self, micro: MicroBatch | None) -> AbstractContextManager[Any]:
        """Around a micro batch that belongs to no window (None: this rank has none): its gradients stay with the parameters,
        and nothing is noted. A collective."""
        return self.strategy.aside(self.module, micro)

    def record(self, micro: MicroBatch, weighted_loss: Tensor) -> None:
        """`weighted_loss`: 0-d, the micro batch's loss times its weight in the window."""
        loss = weighted_loss.detach()
        self.loss = loss if self.loss is None else self.loss + loss

    def finish(self) -> bool:
        if self.loss is None:
            self.module.zero_grad()  # no micro batch did it
            self.strategy.idle_window(self.module, self._send_buffers)
        if self.under_way is not None:
            self.under_way.wait()
        self.strategy.end(self.module)
        return True

    def local_loss(self) -> Tensor | None:
        """This rank's part of the window's loss, 0-d, on the device; None = it had no shard."""
        return self.loss

    def window_loss(self) -> Tensor:
        """Mean loss of the window over all ranks, 0-d in the widest type (a collective: every rank has to ask)."""
        wide = widest(self.device)
        loss = torch.zeros((), dtype=wide, device=self.device) if self.loss is None else self.loss.to(wide)
        return self.ranks.all_reduce(loss)

    def named(self) -> dict[str, float]:
        return {}

    def add_buffers(self, micro: MicroBatch, flat: Tensor) -> None:
        """Take what the forward made of the running statistics, `flat` (n,): the mean over the micro batch's shards."""
        flat, shards = _wide(flat), len(micro.shards)
        self.buffers = flat * shards if self.buffers is None else self.buffers.add_(flat, alpha=shards)
        if micro.is_last:
            self._send_buffers()

    def _send_buffers(self) -> None:
        """Between this rank's last forward and its backward, which hides the way."""
        if self.strategy.meets_in_last_backward and self.statistics is not None and self.ranks.world_size > 1:
            self.buffers = self._sum()
            self.under_way = self.ranks.all_reduce_later(self.buffers)

    def _sum(self) -> Tensor:
        """Of this rank's shards."""
        assert self.statistics is not None
        return torch.zeros_like(_wide(self.statistics)) if self.buffers is None else self.buffers

    def mean_buffers(self) -> Tensor:
        """Mean of what was added over the window's filled shards, (n,). A collective, if nothing was sent before."""
        total = self._sum()
        if self.under_way is None:
            total = self.ranks.all_reduce(total)
        return total / self.window.num_filled

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _wide(flat: Tensor) -> Tensor:
    """Half statistics (O3) as fp32: a sum of variances soon leaves fp16's range."""
    return flat.float() if flat.dtype.itemsize == 2 else flat
