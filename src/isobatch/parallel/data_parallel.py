"""One process, several devices: nn.DataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.checks import positive
from isobatch.errors import ConfigError
from isobatch.parallel.base import Single, check_devices

if TYPE_CHECKING:
    import torch
    from torch import nn

    from isobatch.data.feed import MicroBatch
    from isobatch.parallel.base import OtherChoices
    from isobatch.runtime.distributed import Ranks


@dataclass(frozen=True)
class DataParallel(Single):
    """nn.DataParallel: one process, a replica per device; chunk i of a micro step is the shards of device i.

    Args:
        devices: CUDA ordinals, in this order (null: all visible); made the only visible ones before CUDA starts.
        replicas: how many (null: the number of devices, 1 on CPU). On CPU they run one after another.
    """

    name: str = "dp"
    not_recordable: ClassVar[str | None] = "nn.DataParallel copies the weights and starts threads in every forward"
    devices: list[int] | None = None
    replicas: int | None = None

    def __post_init__(self) -> None:
        check_devices(self.devices)
        if self.replicas is not None:
            positive("parallel.replicas", self.replicas)

    @property
    def known_replicas(self) -> int | None:
        return self.replicas

    def check_with(self, config: OtherChoices) -> None:
        super().check_with(config)
        if config.model.batch_norm == "sync":
            raise ConfigError("model.batch_norm", "sync", "torch's SyncBatchNorm is for processes, and parallel=dp has one",
                              "set parallel=ddp, or model.batch_norm=shard")  # fmt: skip

    def num_replicas(self, ranks: Ranks, device: torch.device) -> int:
        lanes = len(self.lane_devices(device))
        if device.type == "cuda" and self.replicas not in (None, lanes):
            raise ConfigError("parallel.replicas", self.replicas, f"there are {lanes} devices",
                              "set parallel.replicas=null or list as many parallel.devices")  # fmt: skip
        return self.replicas or lanes

    def local_replicas(self, ranks: Ranks, device: torch.device) -> range:
        return range(self.num_replicas(ranks, device))

    def lane_devices(self, device: torch.device) -> list[torch.device]:
        import torch

        if device.type != "cuda":
            return [device]
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]

    def wrap(self, model: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
        from isobatch.parallel.wrappers import ShardedDataParallel

        devices = self.lane_devices(device)
        return ShardedDataParallel(model, devices) if len(devices) > 1 else model

    def gradient_sync(self, wrapped: nn.Module, micro: MicroBatch) -> AbstractContextManager[Any]:
        wrapped.lanes = micro.lanes  # type: ignore[assignment]  # read by ShardedDataParallel.scatter
        return nullcontext()

    def aside(self, wrapped: nn.Module, micro: MicroBatch | None) -> AbstractContextManager[Any]:
        return nullcontext() if micro is None else self.gradient_sync(wrapped, micro)

    def describe(self, ranks: Ranks, device: torch.device) -> str:
        devices = self.lane_devices(device)
        if len(devices) > 1:
            return f"DataParallel over {', '.join(map(str, devices))}"
        return f"DataParallel runs unsplit on {device}: it needs at least two accelerators"
