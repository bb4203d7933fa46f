"""What the step, the loop and the running statistics see of a reduction."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor, nn

    from isobatch.batch_plan import BatchPlan, Window
    from isobatch.data.feed import MicroBatch
    from isobatch.parallel.base import Single
    from isobatch.precision.masters import WorkingCopy
    from isobatch.runtime.distributed import Ranks


class Reducer(Protocol):
    """Sums the gradients, losses and running statistics of a window, in the order of the window's life.

    `begin`, then for each micro batch `shard` (around forward and backward) and `record`, then `finish`: afterwards every
    parameter's gradient is the mean over the window on every rank.

    Attributes:
        module: what the forward goes through. loss_factor: what the loss is multiplied with before backward.
        empty: the window that was finished holds nothing to learn from, on no rank (see elements.py).
    """

    module: nn.Module
    loss_factor: float

    @property
    def empty(self) -> bool: ...

    @property
    def replays(self) -> bool:
        """Whether a window may be run more than once, so that its batches have to be kept."""

    def begin(self, window: Window, statistics: Tensor | None) -> None:
        """`statistics`: the running statistics at its start, flat (n,); None: there are none that learn."""

    def shard(self, micro: MicroBatch) -> AbstractContextManager[None]: ...

    def aside(self, micro: MicroBatch | None) -> AbstractContextManager[None]:
        """Around a micro batch that belongs to no window (None: this rank has none), before the first: its gradients stay
        with the parameters, and nothing is noted. A collective."""

    def record(self, micro: MicroBatch, weighted_loss: Tensor) -> None:
        """`weighted_loss`: 0-d, the micro batch's loss times its weight in the window."""

    def finish(self) -> bool:
        """False when the window has to be run once more. A collective."""

    def local_loss(self) -> Tensor | None:
        """This rank's part of the window's loss, 0-d, on the device; None = it had no shard."""

    def window_loss(self) -> Tensor:
        """Mean loss of the window over all ranks, 0-d. A collective: every rank has to ask."""

    def named(self) -> dict[str, float]:
        """The window's mean of each number that the loss named beside itself. A collective."""

    def add_buffers(self, micro: MicroBatch, flat: Tensor) -> None:
        """Take what the forward made of the running statistics, `flat` (n,): the mean over the micro batch's shards."""

    def mean_buffers(self) -> Tensor:
        """Mean of what was added over the window's filled shards, (n,). A collective where `finish` was not."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Observer(Protocol):
    """Looks on while `reduction=exact` takes shards: `reducer.observer`. Whatever it looks at stays as it is."""

    def begins(self, micro: MicroBatch) -> None:
        """A shard is about to be run."""

    def statistics(self, shard: int, flat: Tensor) -> None:
        """What the shard's forward made of the running statistics, `flat` (n,)."""

    def gradients(self, shard: int, ids: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        """Some of the shard's gradients, of the reducer's parameters `ids`; their memory is used again afterwards."""

    def finished(self) -> None:
        """Every parameter holds the window's gradient, and nothing has been updated. All ranks are here."""


class Reduction(Protocol):
    """The options of group `reduction`. `exact`: plans agree to the bit."""

    @property
    def name(self) -> str: ...

    @property
    def exact(self) -> bool: ...

    def build(self, working: WorkingCopy, strategy: Single, plan: BatchPlan, ranks: Ranks, device: torch.device) -> Reducer: ...

    def describe(self, num_shards: int) -> str: ...
