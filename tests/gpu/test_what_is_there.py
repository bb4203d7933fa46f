"""GPUs that a process sees or does not: SLURM's binding, a driver that does not work; memory that holds a whole training."""

from __future__ import annotations

import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import summary
from jobs import job
from pretended import pretend

from isobatch import run
from isobatch.errors import ConfigError
from isobatch.launch import devices
from isobatch.planner import notes
from isobatch.runtime.distributed import Ranks, choose_device, device_name, shown_one_each

pytestmark = pytest.mark.gpu_pretended


@pytest.mark.parametrize("bound", [{"SLURM_GPUS_PER_TASK": "1"}, {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu:1"},
                                   {"SLURM_GPU_BIND": "single:1"}])  # fmt: skip
def test_a_gpu_of_its_own_is_number_0_in_every_task(bound: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bound.items():
        monkeypatch.setenv(name, value)
    with pretend(1):
        assert choose_device(Ranks(3, 4, 3, 4)) == torch.device("cuda:0")
    monkeypatch.undo()
    assert not shown_one_each({}) and not shown_one_each({"SLURM_GPU_BIND": "closest"})
    with pretend(1), pytest.raises(ConfigError, match="4 processes on this machine share 1 visible"):
        choose_device(Ranks(3, 4, 3, 4))
    assert device_name(1, 2, 2, one_each=True) == "cuda:1"


def test_a_driver_that_does_not_work_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert notes.unusable_gpus() is None
    monkeypatch.setattr(notes, "count_gpus", lambda: 2)

    def too_old() -> bool:
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old (11040).\n (Triggered)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    assert "2 GPU(s)" in (said := notes.unusable_gpus() or "") and "driver on your system is too old" in said
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in (notes.unusable_gpus() or "")


def gpus(monkeypatch: pytest.MonkeyPatch, root: Path, torch_says: str | None, *files: str, **contents: str) -> int:
    """What is counted on a machine that has `files`; `torch_says` of a process that is asked (None: must not be)."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(contents.get(Path(file).name, ""))

    def asked(words: list[str], **_: Any) -> Any:
        assert torch_says is not None
        return subprocess.CompletedProcess(words, 0, torch_says, "")

    monkeypatch.setattr(devices, "ROOT", root)
    monkeypatch.setattr(devices.subprocess, "run", asked)
    devices._asked_torch.cache_clear()
    return devices.count_gpus()


@pytest.mark.parametrize(("found", "torch_says", "files"), [
    (2, None, ["dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"]),
    (0, None, ["dev/nvidiactl"]),
    (1, "1", ["dev/nvidia0", "dev/nvidia1", "proc/driver/nvidia/capabilities/gpu1/mig/gi7/access"]),  # MIG: one instance
    (1, "1", ["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"]),  # WSL2
    (0, None, ["dev/dxg"]),  # WSL2 without a driver: no process is started for it
    (2, "no number", ["dev/nvidia0", "dev/nvidia1", "proc/driver/nvidia/capabilities/gpu1/mig/gi7/access"]),
    (2, None, [f"sys/class/kfd/kfd/topology/nodes/{i}/properties" for i in (1, 2)]),  # ROCm
])  # fmt: skip
def test_gpus_are_counted_as_a_new_process_would_see_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: int,
                                                          torch_says: str | None, files: list[str]) -> None:  # fmt: skip
    for name in (devices.VARIABLE, *devices.AMD):
        monkeypatch.delenv(name, raising=False)
    assert gpus(monkeypatch, tmp_path, torch_says, *files, properties="cpu_cores_count 0\nsimd_count 304\n") == found


@pytest.mark.parametrize(("shown", "torch_says", "found"), [
    ({"HIP_VISIBLE_DEVICES": "0,2"}, None, 2), ({"CUDA_VISIBLE_DEVICES": ""}, None, 0),
    ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, None, 2), ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, "1", 1),
])  # fmt: skip
def test_what_is_hidden_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: dict[str, str],
                                       torch_says: str | None, found: int) -> None:  # fmt: skip
    for name in (devices.VARIABLE, *devices.AMD):
        monkeypatch.delenv(name, raising=False)
    for name, value in shown.items():
        monkeypatch.setenv(name, value)
    cpu = "sys/class/kfd/kfd/topology/nodes/0/properties"
    assert gpus(monkeypatch, tmp_path, torch_says, "dev/nvidia7", cpu, properties="simd_count 0\n") == found


def test_a_variable_that_names_gpus_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left over from another machine, or set by parallel.devices: where there are no cards, none are counted."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpus(monkeypatch, tmp_path, None, "dev/null") == 0


SIZES = 0.95, 0.85, 0.75, 0.65, 0.55


@pytest.mark.parametrize(("words", "shares"), [
    ("", (0.55,)), *(pytest.param(words, SIZES, marks=pytest.mark.slow) for words in ("", "ema=ema")),
])  # fmt: skip
def test_what_batch_micro_auto_finds_to_fit_fits(tmp_path: Path, words: str, shares: tuple[float, ...]) -> None:
    """In a device of any size: with the data that lives on it, the next batch and the average."""
    base: Any = ("data.samples=120", "data.image_size=12", "batch.effective=40", "batch.micro=auto", "steps=2", "eval_every=2")
    with pretend() as machine:
        run.run_job(job(*base, *words.split()), tmp_path / "free", Ranks())
        peak = machine.peak[0]
    micros = {summary(tmp_path / "free")["plan"]["micro_batch"]}
    for i, share in enumerate(shares):
        with pretend(1, memory=int(peak * share)):
            run.run_job(job(*base, *words.split()), tmp_path / str(i), Ranks())
        micros.add(summary(tmp_path / str(i))["plan"]["micro_batch"])
    assert len(micros) > 1, micros
