"""Gradients in buckets: flat memory, cut so that sums, messages and overlap work on a few large pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values of `dtype` are summed in: half precision in float32, the others in their own."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass(frozen=True)
class Bucket:
    """Some tensors of a model, one behind the other.

    Args:
        ids: their numbers among all tensors of the reducer.
        shapes, strides: as the tensors lie in memory, so that a gradient goes in and out without being reordered.
        offsets: of each in the flat memory; size: of all, in elements; padded: up to a multiple of the number of ranks.
        dtype: of the sums.
    """

    ids: list[int]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    offsets: list[int]
    size: int
    padded: int
    dtype: torch.dtype
    device: torch.device

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors within `flat` (padded,)."""
        start = flat.storage_offset()
        return [
            flat.as_strided(shape, stride, start + offset)
            for shape, stride, offset in zip(self.shapes, self.strides, self.offsets, strict=True)
        ]

    def flat_views(self, flat: Tensor) -> list[Tensor]:
        """The same, each as (numel,) in the order of memory."""
        return [flat[offset : offset + shape.numel()] for shape, offset in zip(self.shapes, self.offsets, strict=True)]


def make_bucket(ids: list[int], tensors: Sequence[Tensor], num_ranks: int) -> Bucket:
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += tensor.numel()
    # an empty_like is dense: its strides are the tensor's, but for an expanded one
    strides = [torch.empty_like(t, device="meta").stride() for t in tensors]
    return Bucket(ids, [t.shape for t in tensors], strides, offsets, size, -(-size // num_ranks) * num_ranks,
                  sum_dtype(tensors[0].dtype), tensors[0].device)  # fmt: skip


def make_buckets(tensors: Sequence[Tensor], max_bytes: float, num_ranks: int) -> list[Bucket]:
    """Buckets of about `max_bytes`, from the last tensor to the first: the order in which backward finishes them.

    A function of the model alone, so that all ranks have the same buckets; no bit of a sum depends on them.
    """
    buckets: list[Bucket] = []
    ids: list[int] = []
    size = 0
    for i in reversed(range(len(tensors))):
        dtype = sum_dtype(tensors[i].dtype)
        if ids and (size >= max_bytes or dtype != sum_dtype(tensors[ids[0]].dtype)):
            buckets.append(make_bucket(ids, [tensors[j] for j in ids], num_ranks))
            ids, size = [], 0
        ids.append(i)
        size += tensors[i].numel() * dtype.itemsize
    if ids:
        buckets.append(make_bucket(ids, [tensors[j] for j in ids], num_ranks))
    return buckets


def in_memory_order(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The elements of a dense tensor as (numel,), in the order in which `stride` lays them out."""
    if tensor.stride() != stride:
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
