"""`parallel.devices`: which CUDA devices a process sees, in which order. CUDA reads the variable once, at its start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from isobatch.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
AMD = "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"  # HIP heeds the first name as well
ROOT = Path("/")
ANSWER_S = 120.0  # importing torch from a slow disk included
_started_with: str | None = None  # what CUDA was shown by the latest job of this process


def visible_devices(devices: Sequence[int] | None, visible: str | None) -> str | None:
    """The variable that shows exactly `devices`, in this order, out of those now `visible` (null: all).

    Raises:
        ConfigError: a number that is not among the visible ones.
    """
    if not devices or visible is None:
        return ",".join(map(str, devices)) if devices else visible
    shown = [name.strip() for name in visible.split(",") if name.strip()]
    for device in devices:
        if device >= len(shown):
            raise ConfigError("parallel.devices", list(devices), f"{VARIABLE}={visible} shows {len(shown)} device(s)",
                              f"use numbers below {len(shown)}, or unset the variable")  # fmt: skip
    return ",".join(shown[device] for device in devices)


def count_gpus() -> int:
    """GPUs that a new process would see, without importing torch for it where device files tell (Linux; 0 elsewhere).

    NVIDIA's files are one a card, AMD's topology has a node for each. They say nothing of MIG, whose cards CUDA shows as
    instances (or as one), nor under WSL2: then a process of its own asks torch.
    """
    hidden = next((os.environ[name] for name in (VARIABLE, *AMD) if name in os.environ), None)
    names = None if hidden is None else [name.strip() for name in hidden.split(",") if name.strip() not in ("", "-1")]
    found = _device_files()
    if names is not None and (found or _files_do_not_tell()):  # a name of a card that is not there shows none
        found = len(names)
    if any(name.startswith("MIG") for name in names or ()) or (names is None and _files_do_not_tell()):
        asked = _asked_torch(hidden)
        found = found if asked is None else asked
    return found


def _device_files() -> int:
    nvidia = [p for p in (ROOT / "dev").glob("nvidia*") if p.name.removeprefix("nvidia").isdigit()]
    return len(nvidia) or sum(map(_computes, (ROOT / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")))


def _computes(properties: Path) -> bool:
    """Whether a node of AMD's topology is a GPU (a CPU has no SIMD units) that this process may use."""
    with suppress(OSError):
        return any(line.startswith("simd_count ") and line.split()[1] != "0" for line in properties.read_text().splitlines())
    return False


def _files_do_not_tell() -> bool:
    instances = any((ROOT / "proc/driver/nvidia/capabilities").glob("gpu*/mig/gi*"))
    return instances or ((ROOT / "dev/dxg").exists() and any((ROOT / "usr/lib/wsl/lib").glob("libcuda.so*")))


@lru_cache
def _asked_torch(visible: str | None) -> int | None:
    """What torch finds in a process of its own, since asking may start CUDA; None: no answer. `visible`: what it is shown."""
    words = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        return int(subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout)
    return None


def cuda_started() -> bool:
    """Whether this process has a CUDA context already, made by an earlier job."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def can_show(asked: str | None) -> bool:
    """Whether this process can still be shown `asked`."""
    return not cuda_started() or asked == _started_with


@contextmanager
def showing(asked: str | None) -> Iterator[None]:
    """CUDA_VISIBLE_DEVICES is `asked` (null: not set) inside the block.

    Raises:
        ConfigError: too late for this process.
    """
    global _started_with
    if not can_show(asked):
        raise ConfigError("parallel.devices", asked, f"CUDA has started in this process with {_started_with}",
                          "use the same devices for all jobs of this launch")  # fmt: skip
    before = os.environ.get(VARIABLE)
    _started_with = asked
    _set(asked)
    try:
        yield
    finally:
        _set(before)


def _set(value: str | None) -> None:
    if value is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = value
