"""`parallel.devices`: which CUDA devices a process sees, in which order. CUDA reads the variable once, at its start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from isobatch.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
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
    """GPUs that a new process would see, without importing torch for it (Linux device files; 0 elsewhere)."""
    visible = os.environ.get(VARIABLE)
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])


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
