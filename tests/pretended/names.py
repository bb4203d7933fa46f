"""torch.cuda and torch.accelerator, as far as programs ask them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from pretended import machine
from pretended.machine import here
from pretended.streams import Entered, Event, Stream

TOTAL = 2**36  # bytes of a device that was given no limit
REAL_GENERATOR = torch.Generator


class Generator(REAL_GENERATOR):
    """The CPU's, with a device that it is held to. Seeds give the numbers that they give on a CPU."""

    place: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu"):
        found = torch.device(device)
        self.place = torch.device("cuda", here().index_of(found)) if found.type == "cuda" else found
        here().own_generators[self._cdata] = self  # alive as long as the machine: operators get another object for it

    @property
    def device(self) -> torch.device:
        return self.place


class Properties(SimpleNamespace):
    """Of a device: what nobody asked for yet is 64."""

    def __getattr__(self, name: str) -> int:
        return 64


def properties(device: Any = None) -> Properties:
    here().start()
    physical = here().visible()[here().index_of(device)]
    return Properties(name="Pretended", gcnArchName="", major=9, minor=0, total_memory=total(device), multi_processor_count=132,
                      uuid=f"{physical:08d}-pretended")  # fmt: skip


def total(device: Any = None) -> int:
    return here().memory or TOTAL


def set_device(device: Any) -> None:
    index = here().index_of(device)
    here().start()
    if index >= here().count:
        raise torch.AcceleratorError(f"CUDA error: invalid device ordinal ({index} of {here().count})")
    if index >= 0:
        here().local.current = index


class OnDevice:
    """torch.cuda.device(...)."""

    def __init__(self, device: Any):
        self.idx = here().index_of(device)

    def __enter__(self) -> None:
        self.before = here().local.current
        set_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        here().local.current = self.before


def seed_all(seed: int) -> None:
    for generator in here().generators:
        generator.manual_seed(seed)


def seed_one(seed: int) -> None:
    here().generators[here().local.current].manual_seed(seed)


def synchronize(device: Any = None) -> None:
    here().wait_all("synchronize", device)


def empty_cache() -> None:
    here().check_alive()


def allocated(device: Any = None) -> int:
    return here().allocated[here().index_of(device)]


def highest(device: Any = None) -> int:
    return here().peak[here().index_of(device)]


def reset_peak(device: Any = None) -> None:
    index = here().index_of(device)
    here().peak[index] = here().allocated[index]


def free_and_total(device: Any = None) -> tuple[int, int]:
    return total(device) - allocated(device), total(device)


class Runtime:
    """torch.cuda.cudart()."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        here().check_alive()
        here().registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if machine._HERE:
            here().registered.pop(address, None)
        return 0


def default_stream(device: Any = None) -> Stream:
    here().stream(device)
    return here().defaults.setdefault(here().index_of(device), Stream(device, counted=False))


def patches() -> list[Any]:
    def state(device: Any = None) -> torch.Tensor:
        return here().generators[here().index_of(device)].get_state()

    def set_state(new: torch.Tensor, device: Any = None) -> None:
        here().generators[here().index_of(device)].set_state(new)

    memory: dict[str, Any] = {
        "memory_allocated": allocated, "max_memory_allocated": highest, "memory_reserved": allocated,
        "max_memory_reserved": highest, "reset_peak_memory_stats": reset_peak, "empty_cache": empty_cache,
    }  # fmt: skip
    cuda: dict[str, Any] = {
        **memory, "mem_get_info": free_and_total, "is_available": lambda: here().count > 0,
        "device_count": lambda: here().count, "is_initialized": lambda: here().shown is not None,
        "_lazy_init": lambda: here().start(),
        "init": lambda: here().start(),
        "current_device": lambda: here().local.current, "set_device": set_device,
        "get_device_name": lambda device=None: "Pretended", "get_device_properties": properties,
        "get_device_capability": lambda device=None: (9, 0), "is_bf16_supported": lambda *_, **__: True,
        "synchronize": synchronize, "Stream": Stream, "Event": Event,
        "current_stream": lambda device=None: here().stream(device), "default_stream": default_stream,
        "stream": Entered, "device": OnDevice, "cudart": Runtime, "default_generators": here().generators,
        "manual_seed": seed_one, "manual_seed_all": seed_all, "get_rng_state": state, "set_rng_state": set_state,
        "is_current_stream_capturing": lambda: False, "_is_in_bad_fork": lambda: False,
    }  # fmt: skip
    accelerator: dict[str, Any] = {
        **memory, "is_available": lambda: here().count > 0, "device_count": lambda: here().count,
        "current_device_index": lambda: here().local.current,
        "current_accelerator": lambda check_available=False: torch.device("cuda") if here().count else None,
        "set_device_index": set_device,
        "set_device_idx": set_device, "current_stream": lambda device=None: here().stream(device),
        "synchronize": synchronize, "device_index": OnDevice, "get_memory_info": free_and_total,
    }  # fmt: skip
    found = [mock.patch.object(torch.cuda, name, value) for name, value in cuda.items()]
    found += [mock.patch.object(torch.accelerator, name, value) for name, value in accelerator.items()
              if hasattr(torch.accelerator, name)]  # fmt: skip
    return [*found, mock.patch.object(torch, "Generator", Generator)]
