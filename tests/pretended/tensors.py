"""torch.Tensor's own words about devices, and the copies between them that autograd knows of."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pretended.machine import here
from pretended.streams import Stream
from pretended.watch import on_its_way

REAL = {name: getattr(torch.Tensor, name) for name in ("to", "tolist", "numpy", "pin_memory")}
REAL_CLONE, REAL_RESIZE = torch.UntypedStorage.clone, torch.UntypedStorage.resize_
REAL_AUTOCAST = torch.autocast
REAL_GROUP = torch._C._group_tensors_by_device_and_dtype


class Move(torch.autograd.Function):
    """A copy to another device."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, device: torch.device, dtype: torch.dtype, layout: Any, later: bool) -> Any:
        m = here()
        source = m.device_of(tensor)
        ctx.back = source, tensor.dtype
        m.check_alive()
        stream = m.stream(device if device.type == "cuda" else source)
        stream.time += 1
        m.launches["copy between devices"] += 1
        m.watch._order(tensor, m.place(tensor), stream)
        origin = m.place(tensor)
        if device.type == "cpu" and not later:
            m.waits("copy to the host", source)
        elif source.type == "cpu" and not later:
            m.waits("blocking copy to the device", device)
        elif source.type == "cpu" and origin is not None and origin.pinned:
            origin.sent = stream, stream.time
        if source.type == device.type == "cuda":  # torch orders such copies on both sides
            stream.wait_stream(m.stream(source))
            m.stream(source).wait_stream(stream)
        with _disable_current_modes():
            result = torch.empty_like(tensor, dtype=dtype, memory_format=layout).copy_(tensor.detach())
        place = m.place(result, make=True)
        assert place is not None
        if device.type == "cuda":
            m.settle(place, device, stream)
        elif later:
            place.pinned = True
            on_its_way(result, stream)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return Move.apply(gradient, *ctx.back, torch.preserve_format, False), None, None, None, None


def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    m, source = here(), here().device_of(self)
    first = args[0] if args else kwargs.get("other")
    if isinstance(first, torch.Tensor):
        kwargs.pop("other", None)
        args = (m.device_of(first), first.dtype, *args[1:])
    device, dtype, later, layout = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
    if device is not None and device.type == "cuda":
        device = torch.device("cuda", m.index_of(device))
    if device is None or device == source or device.type not in ("cpu", "cuda"):
        if device is not None and device.type == "cuda":
            rest = {"dtype": dtype or self.dtype, "non_blocking": later, "copy": kwargs.get("copy", False)}
            return REAL["to"](self, **rest, **({} if layout is None else {"memory_format": layout}))
        return REAL["to"](self, *args, **kwargs)
    if source.type not in ("cpu", "cuda"):
        return REAL["to"](self, *args, **kwargs)
    return Move.apply(self, device, dtype or self.dtype, layout or torch.preserve_format, bool(later))


def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
    return to(self, torch.device("cuda", here().index_of(device)), non_blocking=non_blocking)


def tolist(self: torch.Tensor) -> Any:
    if here().on_gpu(self):
        here().waits("tolist", here().device_of(self))
    return REAL["tolist"](self)


def numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if here().on_gpu(self):
        raise TypeError(f"can't convert {here().device_of(self)} device type tensor to numpy. Use Tensor.cpu() to copy the "
                        "tensor to host memory first.")  # fmt: skip
    return REAL["numpy"](self, *args, **kwargs)


def record_stream(self: torch.Tensor, stream: Stream) -> None:
    place = here().place(self, make=True)
    assert place is not None
    place.recorded.add(stream)


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    if here().on_gpu(self):
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    with _disable_current_modes():
        result = self.clone()
    place = here().place(result, make=True)
    assert place is not None
    place.pinned = True
    return result


def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return here().pinned(self) is not None


def storage_clone(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """copy.deepcopy of a tensor comes by here."""
    m = here()
    with _disable_current_modes():
        result = REAL_CLONE(self)
    place = m.place(self)
    if place is not None and place.device is not None:
        copied = m.place(result, make=True)
        assert copied is not None
        stream = m.stream(place.device)
        stream.time += 1
        m.settle(copied, place.device, stream)
    return result


def storage_resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    place, before = here().place(self), self.nbytes()
    result = REAL_RESIZE(self, size)
    if place is not None and place.device is not None:
        place.nbytes = size
        here().grow(place, size - before)
    return result


class Autocast(contextlib.ExitStack):
    """CUDA's own switch (for what asks it) and the CPU's (for what computes). Its dtype is the thread's, as in torch."""

    def __init__(self, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None):
        super().__init__()
        self.device, self.fast_dtype = device_type, dtype or torch.get_autocast_dtype(device_type)
        self.enabled, self.cache_enabled = enabled, cache_enabled

    def __enter__(self) -> Any:
        switches = {"dtype": self.fast_dtype, "enabled": self.enabled, "cache_enabled": self.cache_enabled}
        for kind in dict.fromkeys((self.device, "cpu")):
            self.enter_context(REAL_AUTOCAST(kind, **switches))
        return self

    def __call__(self, function: Any) -> Any:
        return torch.amp.autocast_mode.autocast_decorator(self, function)


def group(lists: Any, *args: Any, **kwargs: Any) -> Any:
    found = REAL_GROUP(lists, *args, **kwargs)
    device_of = here().device_of
    return {(device_of(next(t for t in parts[0][0] if t is not None)), dtype): parts for (_, dtype), parts in found.items()}


def moving(make: Any) -> Any:
    """torch.tensor and its kin: made in main memory, then a blocking copy, as CUDA does it."""

    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        result = make(data, *args, **kwargs)
        return result if device is None else to(result, device)

    return made


def patches() -> list[Any]:
    words = {
        "device": property(lambda self: here().device_of(self)), "is_cuda": property(lambda self: here().on_gpu(self)),
        "to": to, "tolist": tolist, "numpy": numpy, "cuda": cuda, "cpu": lambda self, **_: to(self, "cpu"),
        "record_stream": record_stream, "pin_memory": pin_memory, "is_pinned": is_pinned,
        "get_device": lambda self: here().device_of(self).index if here().on_gpu(self) else -1,
    }  # fmt: skip
    found = [mock.patch.object(torch.Tensor, name, value, create=True) for name, value in words.items()]
    found += [mock.patch.object(torch.UntypedStorage, "clone", storage_clone),
              mock.patch.object(torch.UntypedStorage, "resize_", storage_resize),
              mock.patch.object(torch, "autocast", Autocast), mock.patch.object(torch.amp, "autocast", Autocast),
              mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", group)]  # fmt: skip
    return found + [mock.patch.object(torch, name, moving(getattr(torch, name))) for name in ("tensor", "as_tensor")]
