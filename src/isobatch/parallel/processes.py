"""A process per replica: torch's DistributedDataParallel, and what it shares with others of its kind."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.checks import choice, positive
from isobatch.errors import ConfigError
from isobatch.parallel.base import Single, check_devices

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from isobatch.data.feed import MicroBatch
    from isobatch.runtime.distributed import Ranks


BUCKET_MB = 25.0


@dataclass(frozen=True)
class Processes(Single):
    """A process per replica: what such strategies share.

    Args:
        nproc: ranks that this run starts itself (null: one per device of `devices` or per visible GPU; under torchrun,
            torchrun's).
        devices: CUDA ordinals; rank r takes the r-th. Made the only visible ones before CUDA starts.
        backend: null = the device's own (nccl on CUDA, xccl on XPU, hccl on an NPU), gloo on a CPU.
        timeout_s: seconds that a collective may take.
        reduce_dtype: gradients are added over the ranks in this dtype (null: in their own). float32 for half gradients
            is apex's `allreduce_always_fp32`; bfloat16 halves the traffic of fp32 gradients.
    """

    nproc: int | None = None
    devices: list[int] | None = None
    backend: str | None = None
    find_unused_parameters: Any = "auto"
    timeout_s: float = 600.0
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        check_devices(self.devices)
        choice("parallel.backend", self.backend, (None, "nccl", "xccl", "hccl", "gloo"))
        choice("parallel.find_unused_parameters", self.find_unused_parameters, ("auto", True, False))
        positive("parallel.timeout_s", self.timeout_s)
        choice("parallel.reduce_dtype", self.reduce_dtype, (None, "float32", "bfloat16", "float16"))
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


@dataclass(frozen=True)
class DistributedDataParallel(Processes):
    """torch's DistributedDataParallel: a process per replica, one gradient all-reduce per window.

    Args:
        find_unused_parameters: auto | true | false; auto and true complete what a window's samples leave out, auto says when it
            happens first; false: they leave nothing out, and a run that does ends.
        bucket_mb: size of DDP's gradient buckets in MB.
        gradient_predivide: divide by this before the sum over ranks and by ranks / this after it (apex's
            `gradient_predivide_factor`), for half sums of many ranks; null: everything before.
        gradient_average: true divides the sum over ranks by their number and weighs the losses up for it, as DDP is used; false
            leaves both out (apex's `gradient_average=False`). The training is the same, and half gradients that are many ranks'
            sums are smaller on their way.
        delay_allreduce: true sends everything at once when backward is over (apex's), nothing beside it.
    """

    meets_in_last_backward: ClassVar[bool] = True
    name: str = "ddp"
    bucket_mb: float = BUCKET_MB
    gradient_predivide: float | None = None
    gradient_average: bool = True
    delay_allreduce: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("parallel.bucket_mb", self.bucket_mb)
        if self.gradient_predivide is not None:
            positive("parallel.gradient_predivide", self.gradient_predivide)
            if not self.gradient_average:
                raise ConfigError("parallel.gradient_predivide", self.gradient_predivide, "nothing is divided here, since "
                                  "parallel.gradient_average=false", "set one of them to its default")  # fmt: skip
        if self.delay_allreduce and self.bucket_mb != BUCKET_MB:
            raise ConfigError("parallel.bucket_mb", self.bucket_mb, "there are no buckets with parallel.delay_allreduce=true",
                              "leave one of them out")  # fmt: skip

    def wrap(self, model: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
        from isobatch.parallel.wrappers import distributed_data_parallel

        return model if ranks.world_size == 1 else distributed_data_parallel(model, ranks, device, self)

    def gradient_sync(self, wrapped: nn.Module, micro: MicroBatch) -> AbstractContextManager[Any]:
        step = getattr(wrapped, "micro_step", None)  # one rank: the model itself, nothing to hold back
        return nullcontext() if step is None else step(micro.is_last)

    def aside(self, wrapped: nn.Module, micro: MicroBatch | None) -> AbstractContextManager[Any]:
        aside = getattr(wrapped, "aside", None)
        return nullcontext() if aside is None else aside()

    def idle_window(self, wrapped: nn.Module, before_backward: Callable[[], None]) -> None:
        wrapped.idle(before_backward)  # type: ignore[operator]

    def end(self, wrapped: nn.Module) -> None:
        if hasattr(wrapped, "completion"):
            wrapped.end()  # type: ignore[operator]

    def loss_factor(self, ranks: Ranks) -> float:
        return float(ranks.world_size) if self.gradient_average else 1.0  # DDP divides the sum by the number of ranks

    def describe(self, ranks: Ranks, device: torch.device) -> str:
        more = " (parallel.nproc=N or torchrun starts more)" if ranks.world_size == 1 else ""
        return f"DDP over {ranks.world_size} rank(s), {device.type}{more}"
