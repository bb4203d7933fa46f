"""The two collectives of an exact sum: every element's owner gets all partial sums, and all get the owner's result.

All-to-all and all-gather only move bytes, so nothing here can round. The torch names of 2.14 differ from older ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def to_owners(received: Tensor, sent: Tensor, receive_sizes: list[int], send_size: int) -> Any:
    """Start sending piece r of `sent` (world size * send_size,) to rank r; `receive_sizes`: elements from each rank."""
    return dist.all_to_all_single(received, sent, receive_sizes, [send_size] * len(receive_sizes), async_op=True)


def to_everybody(full: Tensor, part: Tensor) -> Any:
    """Start filling `full` (world size * n,) with every rank's `part` (n,), which may be this rank's piece of `full`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(full, part, async_op=True)


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
