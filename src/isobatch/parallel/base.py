"""What a strategy answers, and the simplest one: one process, one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from isobatch.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from isobatch.batch_plan import Batch, Window
    from isobatch.data.feed import MicroBatch
    from isobatch.parallel.wire import WeightsInParts, WholeGradients
    from isobatch.precision.masters import WorkingCopy
    from isobatch.runtime.distributed import Ranks


class OtherChoices(Protocol):
    """The choices of the other groups (the config), as far as a strategy may refuse them."""

    @property
    def reduction(self) -> Any: ...

    @property
    def ema(self) -> Any: ...

    @property
    def model(self) -> Any: ...


@dataclass(frozen=True)
class Single:
    """One process, one device."""

    name: str = "single"
    # whether ranks are at the same place of their exchanges, before the first of them, between a window's last forward and its
    # backward; then the running statistics are sent from there
    meets_in_last_backward: ClassVar[bool] = False
    not_recordable: ClassVar[str | None] = None  # why micro steps cannot be recorded as CUDA graphs (cuda_graph=true)

    def __init_subclass__(cls) -> None:
        """Strategies of one's own that were written for earlier releases are called by the names of today."""
        for earlier, today in (("shard", "partition"), ("shard_count", "parts_count")):
            if earlier in vars(cls) and today not in vars(cls):
                setattr(cls, today, vars(cls)[earlier])

    @property
    def num_processes(self) -> int:
        """Processes that this run starts itself; 1 = it trains in the process it is in."""
        return 1

    @property
    def known_replicas(self) -> int | None:
        """What the config alone says about `num_replicas`; None where ranks or devices decide."""
        return 1

    def check(self, ranks: Ranks) -> None:
        if ranks.world_size > 1:
            raise ConfigError("parallel.name", self.name, f"was started as {ranks.world_size} ranks",
                              "set parallel=ddp, or start without torchrun")  # fmt: skip

    def num_replicas(self, ranks: Ranks, device: torch.device) -> int:
        """The middle factor of micro x replicas x accumulation."""
        return 1

    def local_replicas(self, ranks: Ranks, device: torch.device) -> range:
        """The replicas that live in this process."""
        return range(1)

    def lane_devices(self, device: torch.device) -> list[torch.device]:
        """Devices that one micro step of this process uses at once, a shard on each."""
        return [device]

    def check_with(self, config: OtherChoices) -> None:
        """Refuse what this strategy cannot do together with the choices of other groups, before any device is touched.

        Raises:
            ConfigError: with a way out.
        """
        if config.reduction.exact and config.model.batch_norm == "sync":
            raise ConfigError("model.batch_norm", "sync", "sums its statistics over ranks in an order that depends on the plan",
                              "set model.batch_norm=shard or reduction=fast")  # fmt: skip

    def parts_count(self, replicas: int) -> int:
        """Parts that weights, gradients and optimizer state are cut into; 1 = every replica holds them whole."""
        return 1

    def gathered_bytes(self, model: nn.Module, replicas: int) -> int:
        """Bytes of whole weights and gradients that a replica holds for a moment beside its parts."""
        return 0

    def wire(self, model: nn.Module, precision: Any, gradients: int) -> WholeGradients | WeightsInParts:
        """What a window sends. `model` as `working_copy` left it; `gradients`: bytes of all, whole, as they are sent."""
        from isobatch.parallel.wire import WholeGradients

        return WholeGradients(gradients)

    def working_copy(self, precision: Any, model: nn.Module, replicas: int) -> WorkingCopy:
        """What the forward runs on. Called before `partition`, `precision` being the chosen one."""
        return precision.working_copy(model)  # type: ignore[no-any-return]

    def partition(self, model: nn.Module, ema: nn.Module | None, precision: Any, ranks: Ranks, device: torch.device,
              example: Callable[[], Tensor]) -> None:  # fmt: skip
        """Leave this rank its part of the weights, in place, before an optimizer is built for them. A collective.

        Args:
            ema: the EMA's copy of `model`, cut alike.
            example: makes inputs (2, ...) as a training forward gets them.
        """

    def wrap(self, model: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
        """The module that the forward goes through, so that after a window's last backward gradients are summed.

        A collective.
        """
        return model

    def gradient_sync(self, wrapped: nn.Module, micro: MicroBatch) -> AbstractContextManager[Any]:
        """Around forward and backward of one micro step; replicas meet only in the last one of a window."""
        return nullcontext()

    def aside(self, wrapped: nn.Module, micro: MicroBatch | None) -> AbstractContextManager[Any]:
        """Around a micro step that belongs to no window; `micro` None: this process has none. A collective."""
        return nullcontext()

    def begin(self, wrapped: nn.Module, batch: Batch, window: Window, ranks: Ranks) -> None:
        """Before the first micro step of a window."""

    def idle(self, wrapped: nn.Module) -> None:
        """Take part in the reduction of a window in which this rank has no shard."""

    def idle_window(self, wrapped: nn.Module, before_backward: Callable[[], None]) -> None:
        """`idle`, and `before_backward` where other ranks are between their last forward and its backward."""
        before_backward()
        self.idle(wrapped)

    def end(self, wrapped: nn.Module) -> None:
        """After the last micro step of a window, or after `idle`."""

    def evaluated(self, model: nn.Module, behind: int) -> None:
        """After the last batch of an evaluation, without gradients. `behind`: batches that other ranks had more."""

    def loss_factor(self, ranks: Ranks) -> float:
        """What the loss is multiplied with, so that the wrapped module's reduction is a sum over replicas."""
        return 1.0

    def describe(self, ranks: Ranks, device: torch.device) -> str:
        return f"one process on {device}"


def check_devices(devices: list[int] | None) -> None:
    """Raise ConfigError unless `devices` is null or a list of different ordinals."""
    if devices is not None and (not devices or len(set(devices)) != len(devices) or min(devices) < 0):
        raise ConfigError("parallel.devices", devices, "is not a list of different device numbers",
                          "set parallel.devices=[0,1,3] or null")  # fmt: skip
