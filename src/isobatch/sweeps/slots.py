"""The parts of this machine that jobs at the same time get: sets of GPUs, shares of cores."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from isobatch.errors import ConfigError
from isobatch.launch import devices
from isobatch.runtime import cores


@dataclass(frozen=True)
class Slot:
    """`gpus`: CUDA's names for them, as in CUDA_VISIBLE_DEVICES; `cores`: numbers for sched_setaffinity."""

    gpus: tuple[str, ...]
    cores: tuple[int, ...]

    def enter(self) -> None:
        """Confine this process, and all that it starts, to the slot. Before CUDA starts."""
        if self.gpus:
            os.environ[devices.VARIABLE] = ",".join(self.gpus)
        elif os.environ.get(devices.VARIABLE) == "":
            del os.environ[devices.VARIABLE]  # submitit hides what it was not asked for; a job alone finds it unset
        if self.cores:
            os.sched_setaffinity(0, self.cores)

    def __str__(self) -> str:
        cores = f"core(s) {', '.join(map(str, self.cores))}" if self.cores else "all cores"
        return f"GPU(s) {', '.join(self.gpus)} and {cores}" if self.gpus else cores


def deal(count: int) -> list[Slot]:
    """`count` slots of equal size out of what this process may use; what does not divide is left idle.

    Equal, because the number of devices decides the plan of `parallel=ddp` and `dp` and the number of cores that of
    threads: which slot a job happens to get must not show in its result.

    Raises:
        ConfigError: fewer GPUs than slots.
    """
    gpus, numbers = gpu_names(), core_numbers()
    if 0 < len(gpus) < count:
        raise ConfigError("sweep.parallel_jobs", count, f"this machine shows {len(gpus)} GPU(s), and jobs share none",
                          f"set sweep.parallel_jobs={len(gpus)} or less")  # fmt: skip
    return [Slot(tuple(share(gpus, i, count)), tuple(share(numbers, i, count))) for i in range(count)]


def share(items: list[Any], i: int, count: int) -> list[Any]:
    """The i-th of `count` equal parts; with fewer items than parts, one item that several parts use."""
    each = len(items) // count
    return items[i * each : (i + 1) * each] if each else items[i % len(items) : i % len(items) + 1] if items else []


def gpu_names() -> list[str]:
    visible = os.environ.get(devices.VARIABLE)
    if visible is None:
        return [str(i) for i in range(devices.count_gpus())]
    return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]


def core_numbers() -> list[int]:
    return cores.numbers()[: cores.usable()]
