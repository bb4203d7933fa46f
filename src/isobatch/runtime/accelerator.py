"""What differs between kinds of device, in one place: generators, memory, clocks, numbers, the backend of collectives.

The rest of the program works on whatever torch.accelerator finds (CUDA and ROCm, XPU, MPS, an NPU) and asks here. Nothing
here knows the config.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from isobatch.errors import ConfigError
from isobatch.runtime import kept_memory

KINDS = ("cpu", "cuda", "mps", "xpu")  # that `device` can ask for; torch calls ROCm's cards cuda


def generator(device: torch.device) -> torch.Generator:
    """The generator that modules on `device` draw from. Seeding it never waits for the device.

    Raises:
        ConfigError: the device's torch module has none; dropout could then not be told what to draw.
    """
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = torch.get_device_module(device)
    if not getattr(module, "default_generators", ()) and hasattr(module, "init"):
        module.init()  # CUDA and XPU make them when the device is first used
    found = getattr(module, "default_generators", ())
    if not found:
        raise ConfigError("device", device.type, "has no random generators in this torch", "set device=cpu")
    return found[device.index or 0]  # type: ignore[no-any-return]


@contextmanager
def kept_generators(devices: Iterable[torch.device]) -> Iterator[None]:
    """Leave torch's generators of the CPU and of `devices` as they were, whatever is drawn inside.

    torch.random.fork_rng knows neither MPS nor several kinds at once.
    """
    states = [(g, g.get_state()) for g in (torch.default_generator, *map(generator, devices))]
    try:
        yield
    finally:
        for kept, state in states:
            kept.set_state(state)


def widest(device: torch.device) -> torch.dtype:
    """The widest floating type that `device` computes in: float64, but for MPS and some of Intel's chips."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not getattr(torch.xpu.get_device_properties(device), "has_fp64", True):
        return torch.float32
    return torch.float64


def tensor_cores(device: torch.device) -> bool:
    """Whether bf16 runs in hardware: CUDA from compute capability 8 on, AMD's matrix cores."""
    if device.type != "cuda":
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device)[0] >= 8


def tf32(device: torch.device) -> bool:
    """Whether convolutions and matmuls of `device` can round their inputs to tf32."""
    return torch.cuda.is_tf32_supported() if torch.version.hip else tensor_cores(device)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small `tensor` of the host on `device`, without waiting for what the device has been given before."""
    if device.type in ("cpu", "mps"):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Fetched:
    """Numbers of a device on their way to the host, behind the work that makes them; nobody waits until they are read.

    Args:
        numbers: 0-d, all of one device.
    """

    def __init__(self, numbers: Sequence[torch.Tensor]):
        device = numbers[0].device
        self.numbers, self.done = list(numbers), None
        if device.type not in ("cpu", "mps"):
            self.numbers = [torch.empty_like(n, device="cpu", pin_memory=True).copy_(n, non_blocking=True) for n in numbers]
            self.done = torch.accelerator.current_stream(device).record_event()

    def read(self) -> list[float]:
        """The numbers; waits for them."""
        if self.done is not None:
            self.done.synchronize()
        return [number.item() for number in self.numbers]

    def arrived(self) -> bool:
        return self.done is None or bool(self.done.query())


def wait(device: torch.device) -> None:
    """Return when `device` has done what it was given, so that a clock read next is true."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give back the memory that torch keeps for later."""
    if device.type == "mps":
        torch.mps.empty_cache()
    elif device.type != "cpu":
        torch.accelerator.empty_cache()


def peak_memory_mb(device: torch.device) -> float:
    """Largest so far, in MiB: of the device, of this process where it works on a CPU. MPS only tells what it holds now."""
    if device.type == "cpu":
        units = 2**20 if sys.platform == "darwin" else 2**10  # Linux counts KiB, macOS bytes
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units, 1)
    held = torch.mps.driver_allocated_memory() if device.type == "mps" else torch.accelerator.max_memory_allocated(device)
    return round(held / 2**20, 1)


def forget_peak_memory(device: torch.device) -> None:
    """Count `peak_memory_mb` anew, where the device (on a CPU: the system) can."""
    if device.type == "cpu":
        kept_memory.give_back()
        with suppress(OSError):  # Linux; from what the process holds now
            Path("/proc/self/clear_refs").write_text("5")
    elif device.type != "mps":
        torch.accelerator.reset_peak_memory_stats(device)


def name(device: torch.device) -> str:
    """As people know it: `cuda:0 (NVIDIA H100)`."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return f"{device} ({module.get_device_name(device)})" if hasattr(module, "get_device_name") else str(device)  # type: ignore[union-attr]


def model_name(device: torch.device) -> str:
    """What decides bits: the card's model, or the vector instructions of a CPU."""
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability()
    module = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else device.type


def backend(device_type: str) -> str:
    """Which backend of torch.distributed moves tensors of `device_type`: nccl, xccl, hccl, ...; gloo where none is known."""
    import torch.distributed as dist

    return "gloo" if device_type == "cpu" else dist.Backend.default_device_backend_map.get(device_type, "gloo")
