"""What every operator has to go through: below autograd and autocast, above the CPU's kernels."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pretended import kernels
from pretended.machine import CPU, REAL_DEVICE, Machine, caller
from pretended.streams import Stream

READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim", "equal",
         "is_nonzero", "bincount"}  # fmt: skip  # whose answer decides a shape or goes to the host
COPIES = {"copy", "_to_copy", "_foreach_copy", "_copy_from"}
INDEXES = {"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"}
SHAPED = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
          "new_zeros", "new_ones", "new_full", "new_empty_strided"}  # fmt: skip  # look at a tensor's shape alone
NO_WORK = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_local_scalar_dense", "set", "resize",
           "detach", "alias", "_version"}  # fmt: skip


class Facts(NamedTuple):
    """Of an operator. written: positions and names of the arguments that it writes."""

    name: str
    written: tuple[int | str, ...]
    draws: bool
    works: bool


@cache
def facts(func: Any) -> Facts:
    schema = func._schema
    name = schema.name.partition("::")[2]
    name = name.rstrip("_") or name
    written = tuple(a.name if a.kwarg_only else i for i, a in enumerate(schema.arguments)
                    if a.alias_info is not None and a.alias_info.is_write)  # fmt: skip
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return Facts(name, written, torch.Tag.nondeterministic_seeded in func.tags, not view and name not in NO_WORK)


def tensors_in(value: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, list | tuple):
        for each in value:
            tensors_in(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            tensors_in(each, found)
    return found


class Watch(TorchDispatchMode):
    def __init__(self, machine: Machine):
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        m, known, kwargs = self.machine, facts(func), dict(kwargs or {})
        tensors = tensors_in(kwargs, tensors_in(args, []))
        places = {id(t): m.place(t) for t in tensors}
        gpus = {p.device for p in places.values() if p is not None and p.device is not None}
        asked = self._asked(known, kwargs, gpus)
        pinned = bool(kwargs.get("pin_memory"))
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        if asked is not None and asked.type == "cuda":
            asked = torch.device("cuda", m.index_of(asked))
            kwargs["device"] = CPU
        if not gpus and (asked is None or asked.type != "cuda"):
            return self._on_host(func, known, args, kwargs, tensors, pinned)
        self._check_devices(func, known, tensors, places, gpus, asked)
        if asked is not None and known.name in SHAPED and asked.type != "cuda":
            return self._on_host(func, known, args, kwargs, [], pinned)
        if known.name in COPIES and tensors:
            target = m.device_of(tensors[0]) if asked is None or known.name != "_to_copy" else asked
        else:
            target = asked if asked is not None else next(iter(gpus))
        device = target if target.type == "cuda" else next(iter(gpus))
        m.check_alive()
        stream = m.stream(device)
        stream.time += 1
        if known.works:
            m.launches[known.name] += 1
        if known.name not in SHAPED:
            for tensor in tensors:
                self._order(tensor, places[id(tensor)], stream)
        if known.name in READS or (known.name == "index" and any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:])):
            m.waits(known.name, device)
        kernels.alert(known.name)
        try:
            if known.name in COPIES:
                result = self._copied(func, known, args, kwargs, tensors, stream, target)
            elif known.draws:
                result = self._drawn(func, args, kwargs, device)
            else:
                result = kernels.TABLE.get(known.name, func)(*args, **kwargs)
        except IndexError as error:  # a label out of range: on a device an assertion in a kernel, and the end of it
            m.dead = f"CUDA error: device-side assert triggered ({error})"
            m.check_alive()
        self._note(result, target, stream, pinned)
        self._mark_written(known, args, kwargs, stream)
        return result

    def _asked(self, known: Facts, kwargs: dict[str, Any], gpus: set[torch.device]) -> torch.device | None:
        """The device that the call names; what torch's own C++ repeats from a tensor (the CPU there) is no wish."""
        asked = kwargs.get("device")
        if asked is None:
            return None
        asked = torch.device(asked)
        if asked.type == "cpu" and gpus and (known.name == "_to_copy" or in_backward()):
            kwargs["device"] = None
            return None
        return asked

    def _on_host(self, func: Any, known: Facts, args: Any, kwargs: Any, tensors: list[torch.Tensor], pinned: bool) -> Any:
        m = self.machine
        if known.written:
            for tensor in written_by(known, args, kwargs):
                place = m.place(tensor)
                if place is not None and place.sent is not None and place.sent[0].reached < place.sent[1]:
                    m.faults["pinned memory written before its copy to the device has ended", caller()] += 1
        if (generator := kwargs.get("generator")) is not None and m.generator_device(generator) != CPU:
            raise RuntimeError("Expected a 'cpu' device type for generator but found 'cuda'")
        result = func(*args, **kwargs)
        opened = in_backward() or m.local.opening
        if pinned or opened:
            for tensor in tensors_in(result, []):
                place = m.place(tensor, make=True)
                if place is not None and place.device is None:
                    place.pinned = place.pinned or pinned
                    place.open = place.open or opened
        return result

    def _check_devices(self, func: Any, known: Facts, tensors: list[torch.Tensor], places: dict[int, Any],
                       gpus: set[torch.device], asked: torch.device | None) -> None:  # fmt: skip
        m = self.machine
        if len(gpus) == 1:
            (device,) = gpus
            for place in places.values():
                if place is not None and place.open:
                    m.settle(place, device, m.stream(device))
        hosts = [t for t in tensors if t.dim() and not m.on_gpu(t) and REAL_DEVICE.__get__(t).type == "cpu"]
        if known.name in COPIES or (known.name in SHAPED and asked is not None):
            return
        if gpus and hosts and known.name in INDEXES:  # CUDA takes index tensors of the host, with a copy
            m.waits("index from the host", next(iter(gpus)))
        elif len(gpus) > 1 or (gpus and hosts):
            on = sorted({str(m.device_of(t)) for t in tensors if t.dim()} | {str(g) for g in gpus})
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {', '.join(on)} ({func})")
        elif asked is not None and gpus and asked not in gpus:
            raise RuntimeError(f"{func} was asked for {asked} with tensors on {', '.join(map(str, gpus))}")

    def _copied(self, func: Any, known: Facts, args: Any, kwargs: Any, tensors: list[torch.Tensor], stream: Stream,
                target: torch.device) -> Any:  # fmt: skip
        """copy_ and its kin: between devices, or within one."""
        m = self.machine
        if known.name == "_to_copy":  # that Tensor.to does not catch: C++'s, within a device
            return func(*args, **kwargs)
        later = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        pairs = list(zip(args[0], args[1], strict=True)) if known.name == "_foreach_copy" else [(args[0], args[1])]
        for to, source in pairs:
            there, origin = m.device_of(to), m.device_of(source)
            if there == origin:
                continue
            if origin.type == "cpu":
                if later and (place := m.pinned(source)) is not None:
                    place.sent = stream, stream.time
                elif not later and source.dim():  # a number is filled in
                    m.waits("blocking copy to the device", there)
            elif there.type == "cuda":
                m.stream(origin).wait_stream(m.stream(there))  # torch orders such copies on both sides
                m.stream(there).wait_stream(m.stream(origin))
            elif not (later and m.pinned(to) is not None):
                m.waits("copy to the host", origin)
        result = func(*args, **kwargs)
        for to, source in pairs:
            if later and not m.on_gpu(to) and m.on_gpu(source) and m.pinned(to) is not None:
                on_its_way(to, stream)
        return result

    def _drawn(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """A random operator draws from its device's generator, or from one that was made for the device."""
        if (generator := kwargs.get("generator")) is not None:
            if (found := self.machine.generator_device(generator)) != device:
                raise RuntimeError(f"Expected a '{device}' generator device but found '{found}'")
            return func(*args, **kwargs)
        own, before = self.machine.generators[device.index], torch.default_generator.get_state()
        torch.default_generator.set_state(own.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            own.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(before)

    def _order(self, tensor: torch.Tensor, place: Any, stream: Stream) -> None:
        """Whether `stream` may use `tensor`: it, or before it the host, has waited for whoever wrote it."""
        if place is None or place.device is None or place.written is None or place.device != stream.device:
            return
        writer, time = place.written
        if writer is not stream and max(stream.knows.get(writer, 0), writer.reached) < time:
            self.machine.faults["used on a stream that did not wait for its writer", caller()] += 1
        if stream is not place.home and place.home is not None:
            where = place.users[stream][1] if stream in place.users else caller()
            place.users[stream] = stream.time, where

    def _note(self, result: Any, target: torch.device, stream: Stream, pinned: bool) -> None:
        for tensor in tensors_in(result, []):
            if target.type == "cuda" or pinned:
                place = self.machine.place(tensor, make=True)
                if place is not None and place.device is None and not place.pinned and place.sent is None:
                    if target.type == "cuda":
                        self.machine.settle(place, target, stream)
                    place.pinned = pinned

    def _mark_written(self, known: Facts, args: Any, kwargs: Any, stream: Stream) -> None:
        for tensor in written_by(known, args, kwargs):
            place = self.machine.place(tensor)
            if place is not None and place.device is not None:
                place.written = stream, stream.time


def written_by(known: Facts, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for which in known.written:
        value = kwargs.get(which) if isinstance(which, str) else args[which] if which < len(args) else None
        tensors_in(value, found)
    return found


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def on_its_way(target: torch.Tensor, stream: Stream) -> None:
    """`target`, in main memory, holds nothing until the host has waited for `stream`."""
    with _disable_current_modes():
        target = target.detach()
        stream.pending.append((stream.time, target, target.clone()))
        target.fill_(float("nan") if target.is_floating_point() else 77)
