"""What this process takes of its devices: their memory, and how busy NVIDIA's management library says they are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from isobatch.runtime import accelerator

LIBRARY = "libnvidia-ml.so.1"  # it comes with the driver


class Rates(ctypes.Structure):
    """nvmlUtilization_t: shares in per cent of the last sixth of a second to second, in which a kernel ran."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class DeviceUse:
    """Of `devices`, those of this process in the order of its lanes. To look takes microseconds, and waits for nothing."""

    def __init__(self, devices: Sequence[torch.device] = ()):
        self.devices = list(devices)
        self._handles = [_handle(device) for device in self.devices]
        self._busy = [[0, 0] for _ in self.devices]  # sum of what was seen, looks; of the whole run
        self._marks = [(0, 0) for _ in self.devices]  # the same where `since` was asked

    def look(self) -> None:
        for handle, seen in zip(self._handles, self._busy, strict=True):
            rates = Rates()
            if handle is not None and _library().nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0:
                seen[0] += rates.gpu
                seen[1] += 1

    def busy(self) -> list[float | None]:
        """Per cent of each device, a mean over all looks; None: nobody can tell."""
        return [round(total / looks, 1) if looks else None for total, looks in self._busy]

    def since(self) -> dict[str, float]:
        """Name -> number, for a logger's row: peak memory so far, and per cent since this was last asked.

        Of several devices all but the first (the main one) have their name in the key."""
        found: dict[str, float] = {}
        for i, (device, seen) in enumerate(zip(self.devices, self._busy, strict=True)):
            place = f"_{device}".replace(":", "") if i else ""
            found[f"{place}_mb"] = accelerator.peak_memory_mb(device)
            total, looks = seen[0] - self._marks[i][0], seen[1] - self._marks[i][1]
            if looks:
                found[f"{place}_busy_percent"] = round(total / looks, 1)
            self._marks[i] = seen[0], seen[1]
        return found


def by_device(devices: Sequence[torch.device], values: Sequence[float | None]) -> float | dict[str, float | None] | None:
    """A number of one device, a map of several."""
    return values[0] if len(values) == 1 else {str(device): value for device, value in zip(devices, values, strict=True)}


@lru_cache
def _library() -> Any:
    """None: there is none, or no driver behind it."""
    try:
        library = ctypes.CDLL(LIBRARY)
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def _handle(device: torch.device) -> Any:
    """NVIDIA's name for `device`; None: it is none of theirs, or shown in another way (an instance of MIG)."""
    if device.type != "cuda" or _library() is None:
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    handle = ctypes.c_void_p()
    name = (uuid if uuid.startswith("GPU-") else f"GPU-{uuid}").encode()
    return handle if _library().nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) == 0 else None
