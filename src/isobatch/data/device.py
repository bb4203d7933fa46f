"""Batches from main memory to the device, as floats with mean 0: uint8 on the way, a quarter of the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isobatch.data.samples import HostBatch
from isobatch.runtime.trees import Tree, mapped, tensors

if TYPE_CHECKING:
    from isobatch.data.base import DataInfo


class SideStream:
    """The stream on which batches of a run are copied: one, since torch keeps what each has used for that one alone."""

    def __init__(self, device: torch.device):
        self.device = device

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)


class ToDevice:
    """
    Args:
        info: its mean and std (of pixels in 0 .. 1) normalise images that arrive as uint8; without them pixels become 0 .. 1.
        channels_last: memory format of the images (N, C, H, W) that come out.
        side: of the run (None: one of its own).
    """

    def __init__(self, device: torch.device, info: DataInfo | None, channels_last: bool, side: SideStream | None = None):
        self.side = side or SideStream(device)
        self.device = device
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        mean = info.mean if info and info.mean else (0.0,)
        std = info.std if info and info.std else (1.0,)
        self.mean = torch.tensor(mean, dtype=torch.float64).mul(255).float().view(1, -1, 1, 1).to(device)
        self.scale = torch.tensor(std, dtype=torch.float64).mul(255).reciprocal().float().view(1, -1, 1, 1).to(device)

    def changes(self, inputs: Tensor) -> bool:
        """Whether `normalized` would do anything to contiguous `inputs`."""
        return inputs.ndim == 4 and (inputs.dtype == torch.uint8 or self.format is torch.channels_last)

    def normalized(self, inputs: Tensor) -> Tensor:
        """Images (N, C, H, W) in this object's memory format; uint8 becomes float32. Anything else as it is."""
        if inputs.ndim != 4:
            return inputs
        if inputs.dtype != torch.uint8:
            return inputs.contiguous(memory_format=self.format)
        return inputs.to(torch.float32, memory_format=self.format).sub_(self.mean).mul_(self.scale)

    def __call__(self, batch: HostBatch) -> tuple[Tree, Tree]:
        return mapped(self._input, batch.inputs), mapped(self._moved, batch.targets)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _input(self, tensor: Tensor) -> Tensor:
        moved = self._moved(tensor)
        # of several inputs, those of other channels than the images' are none
        other = tensor.dtype == torch.uint8 and tensor.ndim == 4 and self.mean.shape[1] not in (1, tensor.shape[1])
        return moved if other else self.normalized(moved)

    def stream(self, batches: Iterator[HostBatch]) -> Iterator[tuple[Tree, Tree]]:
        """Each batch on the device. On CUDA the copy of the next one runs beside the computation, on a stream of its own."""
        if self.device.type != "cuda":
            yield from map(self, batches)
            return
        side, ready = self.side.stream, None
        for batch in batches:
            with torch.cuda.stream(side):
                following = (*self(batch), side.record_event())
            if ready is not None:
                yield self._handed_over(*ready)
            ready = following
        if ready is not None:
            yield self._handed_over(*ready)

    def _handed_over(self, inputs: Tree, targets: Tree, done: torch.cuda.Event) -> tuple[Tree, Tree]:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(done)
        for tensor in tensors((inputs, targets)):
            tensor.record_stream(current)  # else the allocator may hand its memory to the side stream too early
        return inputs, targets
