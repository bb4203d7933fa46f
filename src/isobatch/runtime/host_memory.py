"""Main memory that an accelerator copies to and from while the host goes on."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

log = logging.getLogger(__name__)
ALIGNED = 64  # bytes


class HostMemory:
    """Tensors in one piece of page-locked memory, exactly as large as they need, which is given back with this object.

    torch's own allocator rounds each tensor up to a power of two, asks the driver for each, and keeps all for ever. Other
    accelerators than CUDA have no other; where memory cannot be locked, copies wait, and everything else is the same.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.piece: Tensor | None = None

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors in main memory, shaped and laid out as `tensors`, each a storage of its own; their content is undefined."""
        if self.device.type != "cuda":
            return [torch.empty_like(t, device="cpu", pin_memory=self.device.type != "cpu") for t in tensors]
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
        self.piece = torch.empty(size, dtype=torch.uint8)
        self._lock(self.piece)
        buffer = self.piece.numpy()
        return [_at(buffer, start, tensor) for start, tensor in zip(starts, tensors, strict=True)]

    def _lock(self, piece: Tensor) -> None:
        if not piece.numel():
            return
        runtime, address = torch.cuda.cudart(), piece.data_ptr()
        if int(runtime.cudaHostRegister(address, piece.numel(), 0)) != 0:
            log.info("%d MB of main memory cannot be page-locked: copies to it wait", piece.numel() >> 20)
            return
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False


def _at(buffer: object, start: int, like: Tensor) -> Tensor:
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(buffer, dtype=like.dtype, count=like.numel(), offset=start)
    # an empty_like is dense: its strides are the tensor's, but for one that is expanded or has gaps
    return flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())
