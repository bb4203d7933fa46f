"""Several devices at once: nn.DataParallel's copies and threads, and the buckets that DDP makes in C++."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import comm

from pretended.machine import here


def on(device: Any) -> torch.device:
    return torch.device("cuda", here().index_of(device))


def broadcast(tensors: Any, devices: Any, buffer_size: int = 0) -> list[list[torch.Tensor]]:
    """The first device gets the very tensors, as torch's C++ hands them on."""
    return [[t if t.device == on(d) else t.to(on(d), non_blocking=True) for t in tensors] for d in devices]


def reduce_add(inputs: Any, destination: Any = None, buffer_size: int = 0) -> tuple[torch.Tensor, ...]:
    """Sums in the order of the devices."""
    sums = []
    for parts in zip(*inputs, strict=True):
        total = parts[0].to(on(destination), non_blocking=True)
        for part in parts[1:]:
            total = total + part.to(on(destination), non_blocking=True)
        sums.append(total)
    return tuple(sums)


def gather(tensors: Any, dim: int = 0, destination: Any = None, *, out: Any = None) -> torch.Tensor:
    return torch.cat([t.to(on(destination), non_blocking=True) for t in tensors], dim)


def scatter(tensor: Any, devices: Any = None, chunk_sizes: Any = None, dim: int = 0, streams: Any = None, *,
            out: Any = None) -> tuple[torch.Tensor, ...]:  # fmt: skip
    parts = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
    return tuple(part.to(on(device), non_blocking=True) for part, device in zip(parts, devices, strict=False))


class Thread(threading.Thread):
    """A replica's: watched like the one that starts it, and run before the next one starts, so that runs repeat."""

    def start(self) -> None:
        super().start()
        super().join()

    def join(self, timeout: float | None = None) -> None:
        """It has ended."""

    def run(self) -> None:
        with here().watch:
            super().run()


@contextmanager
def opening() -> Iterator[None]:
    """What torch's C++ allocates inside belongs to the first device it meets."""
    before, here().local.opening = here().local.opening, True
    try:
        yield
    finally:
        here().local.opening = before


def patches() -> list[Any]:
    module = sys.modules["torch.nn.parallel.parallel_apply"]  # the package has a function of that name
    found = [mock.patch.object(comm, "broadcast_coalesced", broadcast),
             mock.patch.object(comm, "reduce_add_coalesced", reduce_add),
             mock.patch.object(comm, "gather", gather), mock.patch.object(comm, "scatter", scatter),
             mock.patch.object(module, "threading", SimpleNamespace(Thread=Thread, Lock=threading.Lock))]  # fmt: skip
    if not dist.is_available():
        return found

    class Reducer(dist.Reducer):
        def __init__(self, *args: Any, **kwargs: Any):
            with opening():
                super().__init__(*args, **kwargs)

        def _rebuild_buckets(self) -> bool:
            with opening():
                return super()._rebuild_buckets()

    return [*found, mock.patch.object(dist, "Reducer", Reducer)]
