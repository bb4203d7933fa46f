"""The two collectives of an exact sum: every element's owner gets all partial sums, and all get the owner's result.

All of it only moves bytes, so nothing here can round. On a CPU the ranks send to each other: gloo's all-gather goes through
memory of its own and copies everything out of it, its all-to-all also copies what a rank sends to itself. Elsewhere they are
the backend's collectives, whose names in torch 2.14 differ from older ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Transfers:
    """Several under way between this rank and others, as one piece of work."""

    def __init__(self, works: list[Any]):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def keeps_own(device: torch.device) -> bool:
    """Whether a rank does not send to itself: what it owns of its own sums it reads where it lies."""
    return device.type == "cpu"


def to_owners(received: Tensor, sent: Tensor, receive_sizes: list[int], send_size: int) -> Any:
    """Start sending piece r of `sent` (world size * send_size,) to rank r; `receive_sizes`: elements from each rank, one
    behind the other in `received`, where a rank `keeps_own` 0 from itself."""
    if keeps_own(sent.device):
        return _to_each(list(received.split(receive_sizes)), list(sent.split(send_size)) if send_size else [])
    return dist.all_to_all_single(received, sent, receive_sizes, [send_size] * len(receive_sizes), async_op=True)


def to_everybody(full: Tensor, part: Tensor) -> Any:
    """Start filling `full` (world size * n,) with every rank's `part` (n,), which may be this rank's piece of `full`."""
    if keeps_own(full.device):
        pieces = list(full.split(part.numel()))
        return _to_each(pieces, [part] * len(pieces))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(full, part, async_op=True)


def _to_each(received: list[Tensor], sent: list[Tensor]) -> Transfers:
    """Start filling `received[r]` from every other rank r, and sending it `sent[r]`. Between two ranks messages keep their
    order, and all ranks start theirs in the same one."""
    others = [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    works = [dist.irecv(received[r], r) for r in others if received[r].numel()]
    return Transfers(works + [dist.isend(sent[r], r) for r in others if sent])


def sum_at_owners(part: Tensor, full: Tensor) -> Any:
    """Start filling `part` (n,) with the sum of every rank's own piece of `full` (world size * n,)."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(part, full, async_op=True)


class Scratch:
    """Buffers for what is under way: a few, reused by one bucket after the other.

    Args:
        slots: buckets that may be under way at the same time.
    """

    def __init__(self, slots: int = 2):
        self.slots = slots
        self.buffers: dict[tuple[Any, ...], Tensor] = {}

    def take(self, purpose: str, index: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(size,) for bucket `index`; holds what was left there. Valid until bucket `index + slots` takes its own."""
        key = (purpose, index % self.slots, dtype, device)
        buffer = self.buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[key] = torch.zeros(size, dtype=dtype, device=device)
        return buffer[:size]
