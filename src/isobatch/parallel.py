"""Group `parallel`: where the replicas of the model live.

A strategy answers: how many processes does this run start itself, how many replicas does that make, which of them live
in this process, and how is the model wrapped so that their gradients meet.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.checks import choice, positive
from isobatch.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from isobatch.data.feed import MicroBatch
    from isobatch.distributed import Ranks


@dataclass(frozen=True)
class Single:
    """One process, one device."""

    name: str = "single"

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

    def wraps_late(self, ranks: Ranks) -> bool:
        """Whether `wrap` wants to see the first shard of this rank."""
        return False

    def wrap(self, model: nn.Module, ranks: Ranks, device: torch.device, first: Tensor | None = None) -> nn.Module:
        """The module that the forward goes through, so that after a window's last backward gradients are summed.

        `first`: inputs of this rank's first shard, where `wraps_late` and where there is one. A collective.
        """
        return model

    def gradient_sync(self, wrapped: nn.Module, micro: MicroBatch) -> AbstractContextManager:
        """Around forward and backward of one micro step; replicas meet only in the last one of a window."""
        return nullcontext()

    def idle(self, wrapped: nn.Module) -> None:
        """Take part in the reduction of a window in which this rank has no shard."""

    def loss_factor(self, ranks: Ranks) -> float:
        """What the loss is multiplied with, so that the wrapped module's reduction is a sum over replicas."""
        return 1.0

    def describe(self, ranks: Ranks, device: torch.device) -> str:
        return f"one process on {device}"


@dataclass(frozen=True)
class DataParallel(Single):
    """nn.DataParallel: one process, a replica per device; chunk i of a micro step is one shard, on device i.

    Args:
        devices: CUDA ordinals, in this order (null: all visible); made the only visible ones before CUDA starts.
        replicas: how many (null: the number of devices, 1 on CPU). On CPU they run one after another.
    """

    name: str = "dp"
    devices: list[int] | None = None
    replicas: int | None = None

    def __post_init__(self) -> None:
        check_devices(self.devices)
        if self.replicas is not None:
            positive("parallel.replicas", self.replicas)

    @property
    def known_replicas(self) -> int | None:
        return self.replicas

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

    def wrap(self, model: nn.Module, ranks: Ranks, device: torch.device, first: Tensor | None = None) -> nn.Module:
        from isobatch.wrappers import ShardedDataParallel

        devices = self.lane_devices(device)
        return ShardedDataParallel(model, devices) if len(devices) > 1 else model

    def gradient_sync(self, wrapped: nn.Module, micro: MicroBatch) -> AbstractContextManager:
        wrapped.shard_sizes = micro.sizes  # type: ignore[assignment]  # read by ShardedDataParallel.scatter
        return nullcontext()

    def describe(self, ranks: Ranks, device: torch.device) -> str:
        devices = self.lane_devices(device)
        if len(devices) > 1:
            return f"DataParallel over {', '.join(map(str, devices))}"
        return f"DataParallel runs unsplit on {device}: it needs at least two accelerators"


@dataclass(frozen=True)
class DistributedDataParallel(Single):
    """torch's DistributedDataParallel: a process per replica, one gradient all-reduce per window.

    Args:
        nproc: ranks that this run starts itself (null: one per device of `devices` or per visible GPU; under torchrun,
            torchrun's).
        devices: CUDA ordinals; rank r takes the r-th. Made the only visible ones before CUDA starts.
        backend: null = nccl on CUDA, else gloo.
        find_unused_parameters: auto | true | false; auto looks at the first shard of every rank and says what it chose.
        timeout_s: seconds that a collective may take.
        bucket_mb: size of DDP's gradient buckets in MB.
        reduce_dtype: gradients are added over the ranks in this dtype (null: in their own). float32 for half gradients
            is apex's `allreduce_always_fp32`; bfloat16 halves the traffic of fp32 gradients.
        gradient_predivide: divide by this before the sum over ranks and by ranks / this after it (apex's
            `gradient_predivide_factor`), for half sums of many ranks; null: everything before.
    """

    name: str = "ddp"
    nproc: int | None = None
    devices: list[int] | None = None
    backend: str | None = None
    find_unused_parameters: Any = "auto"
    timeout_s: float = 600.0
    bucket_mb: float = 25.0
    reduce_dtype: str | None = None
    gradient_predivide: float | None = None

    def __post_init__(self) -> None:
        check_devices(self.devices)
        choice("parallel.backend", self.backend, (None, "nccl", "gloo"))
        choice("parallel.find_unused_parameters", self.find_unused_parameters, ("auto", True, False))
        positive("parallel.timeout_s", self.timeout_s)
        positive("parallel.bucket_mb", self.bucket_mb)
        choice("parallel.reduce_dtype", self.reduce_dtype, (None, "float32", "bfloat16", "float16"))
        if self.gradient_predivide is not None:
            positive("parallel.gradient_predivide", self.gradient_predivide)
        if self.nproc is not None:
            positive("parallel.nproc", self.nproc)
            if self.devices is not None and len(self.devices) != self.nproc:
                raise ConfigError("parallel.nproc", self.nproc, f"parallel.devices lists {len(self.devices)} devices",
                                  f"set parallel.nproc={len(self.devices)} or null")  # fmt: skip

    @property
    def num_processes(self) -> int:
        if self.nproc is not None:
            return self.nproc
        return len(self.devices) if self.devices is not None else 1

    @property
    def known_replicas(self) -> int | None:
        return self.num_processes if self.num_processes > 1 else None

    def check(self, ranks: Ranks) -> None:
        if self.devices is not None and ranks.local_world_size != len(self.devices):
            raise ConfigError("parallel.devices", self.devices, f"this node runs {ranks.local_world_size} ranks",
                              f"list {ranks.local_world_size} devices or start {len(self.devices)} ranks")  # fmt: skip

    def num_replicas(self, ranks: Ranks, device: torch.device) -> int:
        return ranks.world_size

    def local_replicas(self, ranks: Ranks, device: torch.device) -> range:
        return range(ranks.rank, ranks.rank + 1)

    def wraps_late(self, ranks: Ranks) -> bool:
        return ranks.world_size > 1 and self.find_unused_parameters == "auto"

    def wrap(self, model: nn.Module, ranks: Ranks, device: torch.device, first: Tensor | None = None) -> nn.Module:
        from isobatch.wrappers import distributed_data_parallel

        if ranks.world_size == 1:
            return model
        return distributed_data_parallel(model, ranks, device, self, first)

    def gradient_sync(self, wrapped: nn.Module, micro: MicroBatch) -> AbstractContextManager:
        no_sync = getattr(wrapped, "no_sync", nullcontext)  # one rank: the model itself, nothing to hold back
        return nullcontext() if micro.is_last else no_sync()

    def idle(self, wrapped: nn.Module) -> None:
        wrapped(None).backward()

    def loss_factor(self, ranks: Ranks) -> float:
        return float(ranks.world_size)  # DDP divides the sum by the number of ranks

    def describe(self, ranks: Ranks, device: torch.device) -> str:
        return f"DDP over {ranks.world_size} rank(s), {device.type}"


def check_devices(devices: list[int] | None) -> None:
    """Raise ConfigError unless `devices` is null or a list of different ordinals."""
    if devices is not None and (not devices or len(set(devices)) != len(devices) or min(devices) < 0):
        raise ConfigError("parallel.devices", devices, "is not a list of different device numbers",
                          "set parallel.devices=[0,1,3] or null")  # fmt: skip


TABLE: dict[str, Any] = {"single": Single, "dp": DataParallel, "ddp": DistributedDataParallel}
