"""What a process takes of its GPUs: the memory of each, and how busy the driver says that they are."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import summary
from jobs import job
from pretended import pretend

from isobatch import launch
from isobatch.report.read import read_run
from isobatch.runtime import device_use


class Driver:
    """libnvidia-ml of a machine whose card k is busy for 10 (k + 1) per cent."""

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        handle._obj.value = 1 + int(name.removeprefix(b"GPU-")[:8])
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, rates: Any) -> int:
        rates._obj.gpu = 10 * (handle.value or 0)
        return 0


@pytest.mark.gpu_pretended
def test_every_device_of_data_parallel_is_told_in_summary_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_use, "_library", Driver)
    with pretend(4):
        launch.run(job("parallel=dp", "parallel.devices=[0,1,3]", "logger=csv", "steps=2", "data.image_size=32"), tmp_path)
    (rank,) = summary(tmp_path)["ranks"]
    peaks = list(rank["peak_memory_mb"].values())
    assert list(rank["peak_memory_mb"]) == ["cuda:0", "cuda:1", "cuda:2"] and peaks[0] > peaks[1] > 0 and peaks[2] > 0
    assert rank["busy_percent"] == {"cuda:0": 10.0, "cuda:1": 20.0, "cuda:2": 40.0}  # the third one is card 3
    told = read_run("0", tmp_path).memory
    assert [(memory.label, memory.busy) for memory in told] == [
        ("rank 0 cuda:0", 10),
        ("rank 0 cuda:1", 20),
        ("rank 0 cuda:2", 40),
    ]
    head = (tmp_path / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"memory/rank0_mb", "memory/rank0_cuda1_mb", "memory/rank0_busy_percent", "memory/rank0_cuda2_busy_percent"} <= {
        *head
    }


def test_where_nobody_can_tell_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    use = device_use.DeviceUse([torch.device("cpu")])
    use.look()
    assert use.busy() == [None] and set(use.since()) == {"_mb"}
    device_use._library.cache_clear()
    monkeypatch.setattr(device_use, "LIBRARY", "libnowhere.so.1")
    assert device_use._library() is None
    device_use._library.cache_clear()
