"""The strategy of micro steps that are recorded and replayed: nothing meets in a backward, the window's sums are one piece."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isobatch.parallel.base import Single

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.batch_plan import Batch, Window
    from isobatch.data.feed import MicroBatch
    from isobatch.runtime.distributed import Ranks
    from isobatch.train.gradients import Gradients


class AllAtOnce:
    """What a reducer asks of a strategy, for gradients that are kept in flat tensors: one sum of each over the ranks.

    A recording cannot hold DDP's hooks. What they save by sending while backward runs is little for the small models
    that are worth recording.

    Args:
        options: of the strategy whose place this takes: `reduce_dtype` and `gradient_predivide`, where it has them.
    """

    meets_in_last_backward = False

    def __init__(self, options: Single, gradients: Gradients, ranks: Ranks):
        self.gradients, self.ranks = gradients, ranks
        dtype = getattr(options, "reduce_dtype", None)
        self.dtype: torch.dtype | None = getattr(torch, dtype) if dtype else None
        self.divisor: float = getattr(options, "gradient_predivide", None) or 1.0

    def wrap(self, model: nn.Module, ranks: Ranks, device: torch.device, first: Tensor | None = None) -> nn.Module:
        return model

    def loss_factor(self, ranks: Ranks) -> float:
        return 1.0

    def begin(self, wrapped: nn.Module, batch: Batch, window: Window, ranks: Ranks) -> None:
        """Nothing is held back."""

    def gradient_sync(self, wrapped: nn.Module, micro: MicroBatch) -> AbstractContextManager[Any]:
        return nullcontext()

    def idle_window(self, wrapped: nn.Module, before_backward: Callable[[], None]) -> None:
        self.gradients.reset()  # without a shard they are zeros

    @torch.no_grad()
    def end(self, wrapped: nn.Module) -> None:
        if not self.gradients.flat:
            self.gradients.attach(self.ranks)
        if self.ranks.world_size == 1:
            return
        for flat in self.gradients.flat:
            wire = flat.to(self.dtype or flat.dtype)
            if self.divisor != 1:
                wire.div_(self.divisor)
            self.ranks.all_reduce(wire)
            if self.divisor != 1:
                wire.mul_(self.divisor)
            if wire is not flat:
                flat.copy_(wire)
