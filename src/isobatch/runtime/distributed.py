"""Ranks that work together: who they are, what they tell each other, on which device each one works.

Nothing here knows the config. With one process every exchange is the identity, so callers need no branch.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from isobatch.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Ranks:
    """This process among its peers, with the words of torch.distributed.

    Every method is a collective: all ranks call it, in the same order.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """True on rank 0, which alone writes files and logs."""
        return self.rank == 0

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Combine `tensor` (same shape and dtype on all ranks) in place with `op` (sum, max, min or avg); return it."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()))
        return tensor

    def all_reduce_later(self, tensor: torch.Tensor, op: str = "sum") -> Any:
        """Start `all_reduce`; `wait()` of what is returned ends it (of a CUDA tensor: for the stream, not for the host)."""
        import torch.distributed as dist

        return dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()), async_op=True)

    def agree(self, value: int) -> int:
        """The largest `value` of any rank. Goes through main memory, so that no accelerator has to be waited for."""
        if self.world_size == 1:
            return value
        import torch

        return int(self.all_reduce(torch.tensor([value], dtype=torch.int64), op="max").item())

    def broadcast_object(self, obj: Any) -> Any:
        """Rank 0's `obj` on every rank; it has to be plain data."""
        if self.world_size == 1:
            return obj
        import torch.distributed as dist

        box = [obj if self.is_main else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather_objects(self, obj: Any) -> list[Any] | None:
        """Every rank's `obj` in rank order on rank 0, None elsewhere."""
        if self.world_size == 1:
            return [obj]
        import torch.distributed as dist

        box: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(obj, box, dst=0)
        return box


@functools.cache
def ranks_of_this_process() -> Ranks:
    """`ranks_from_environment`, asked once: user code may set RANK and WORLD_SIZE for purposes of its own."""
    return ranks_from_environment(os.environ)


@functools.cache
def joined() -> bool:
    """Whether somebody else started this process as a rank, be it the only one. Asked once, as above."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ranks_from_environment(environ: Mapping[str, str] | None = None) -> Ranks:
    """The ranks that torchrun (or whoever sets RANK and WORLD_SIZE, see launch/schedulers.py) started this process as; one rank
    without. Of this process (environ=None) they are read once.

    SLURM's own names fill in for a missing LOCAL_RANK and LOCAL_WORLD_SIZE.

    Raises:
        ConfigError: a number that is none, or a rank outside its world.
    """

    if environ is None:
        return ranks_of_this_process()

    def number(default: int, *names: str) -> int:
        for name in names:
            if environ.get(name):
                try:
                    return int(environ[name])
                except ValueError:
                    raise ConfigError(name, environ[name], "is not a number", "let torchrun set it") from None
        return default

    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return Ranks()
    rank, world_size = number(0, "RANK"), number(1, "WORLD_SIZE")
    local_world_size = number(world_size, "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
    local_rank = number(rank % max(1, local_world_size), "LOCAL_RANK", "SLURM_LOCALID")
    if not 0 <= rank < world_size:
        raise ConfigError("RANK", rank, f"is not below WORLD_SIZE={world_size}", "let torchrun set both")
    return Ranks(rank, world_size, local_rank, local_world_size)


def shown_one_each(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether SLURM has bound each process of a node to a GPU of its own, which is then the only one that it sees."""
    per_task = environ.get("SLURM_GPUS_PER_TASK") or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    return bool(per_task or environ.get("SLURM_GPU_BIND", "none") not in ("", "none", "closest"))


def device_name(local_rank: int, local_world_size: int, accelerators: int, kind: str = "cuda", one_each: bool = False) -> str:
    """The device of one process among those of its machine: `cuda:<local rank>`, or `cpu` when there is none.

    The number is logical, so CUDA_VISIBLE_DEVICES plays no part in it; the global rank is never a device number.
    `one_each`: every process sees its own one alone, which has number 0 in each of them.

    Raises:
        ConfigError: more processes than devices; sharing one is never right with nccl and always slow.
    """
    if accelerators == 0:
        return "cpu"
    if one_each and accelerators == 1:
        return f"{kind}:0"
    if local_world_size > accelerators:
        raise ConfigError("parallel.nproc", local_world_size,
                          f"{local_world_size} processes on this machine share {accelerators} visible device(s)",
                          f"start at most {accelerators}, or let SLURM bind a GPU to each (srun --gpus-per-task=1); "
                          "accumulation keeps the effective batch")  # fmt: skip
    return f"{kind}:{local_rank}"


def choose_device(ranks: Ranks, asked: str | None = None) -> torch.device:
    """The device that this process works on; made the current one if it is an accelerator. See `device_name`.

    Args:
        asked: `cpu`, or the kind of accelerator that has to be there; None: what is there.

    Raises:
        ConfigError: it is not there, or too few of it.
    """
    import torch

    found = None if asked == "cpu" else torch.accelerator.current_accelerator(check_available=True)
    if asked not in (None, "cpu") and (found is None or found.type != asked):
        there = "no accelerator" if found is None else f"{found.type} and no {asked}"
        raise ConfigError("device", asked, f"torch finds {there} on this machine",
                          f"set device={'cpu' if found is None else found.type}, or null for what is there")  # fmt: skip
    count = torch.accelerator.device_count() if found is not None else 0
    kind = found.type if found else "cpu"
    device = torch.device(device_name(ranks.local_rank, ranks.local_world_size, count, kind, shown_one_each()))
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    return device


def choose_backend(asked: str | None, device_type: str) -> str:
    """What init_process_group gets: the device's own backend (nccl, xccl, hccl), gloo on a CPU, unless `asked` for.

    Beside a device's own one, gloo stays at hand for what lives in main memory: agreements, objects, checkpoints.

    Raises:
        ConfigError: one of another kind of device.
    """
    from isobatch.runtime.accelerator import backend

    own = backend(device_type)
    if asked in (None, own):
        return own if own == "gloo" else f"cpu:gloo,{device_type}:{own}"
    if asked != "gloo":
        where = {"nccl": "CUDA", "xccl": "an XPU", "hccl": "an NPU"}.get(asked, "another device")
        raise ConfigError("parallel.backend", asked, f"{asked} needs {where}, but this process works on {device_type}",
                          "set parallel.backend=null or gloo")  # fmt: skip
    return asked


def create_group(ranks: Ranks, backend: str, store: Any, timeout_s: float, device: torch.device | None = None) -> None:
    """Make the process group of one job over `store`; no collective of it may take longer than `timeout_s` seconds.

    Args:
        device: this rank's. With nccl its communicator is then made here, while every rank is known to be there, and not in
            the middle of the first step; groups of fewer ranks are split from it.
    """
    import torch.distributed as dist

    known = device if device is not None and "nccl" in backend else None
    try:
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size,
                                timeout=timedelta(seconds=timeout_s), device_id=known)  # fmt: skip
    except Exception:
        # torch counts the groups that a process has begun, and ranks meet under that number: where one failed to join and its
        # peers did not, the next job's group would never meet
        with contextlib.suppress(AttributeError):
            dist.distributed_c10d._world.group_count = 0
        raise


def destroy_group() -> None:
    """Undo `create_group`; does nothing where there is no group."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
