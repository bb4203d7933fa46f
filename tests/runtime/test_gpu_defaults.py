"""What a GPU user gets without asking, on pretended devices: tf32, bf16, channels_last; all told, and kept by a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import plain, train

from isobatch import config as configuration
from isobatch.precision import Autocast, Full
from isobatch.runtime import hardware
from isobatch.runtime.distributed import Ranks

CUDA = torch.device("cuda", 0)
QUIET = ("logger=none", "model=linear", "threads=1", "epochs=null", "checkpoint.every=1", "scheduler=constant")
IMAGES = ("data=synthetic", "data.image_size=8", "data.samples=16", "data.eval_samples=4", "batch.effective=8")


@pytest.fixture(autouse=True)
def _flags() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def capability(monkeypatch: pytest.MonkeyPatch, *majors: int) -> None:
    """The cards' compute capabilities, in order of their numbers."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (majors[torch.device(device).index or 0], 0))


def precision_of(*words: str) -> Any:
    return configuration.load(plain(*words)).precision


def plan(folder: Path) -> Any:
    return json.loads((folder / "plan.json").read_text())


@pytest.mark.parametrize(("words", "matmuls", "convolutions"), [
    (("precision=fp32",), False, True), (("precision=amp",), False, True), (("precision=tf32",), True, True),
    (("precision=fp32", "precision.tf32=false"), False, False),
])  # fmt: skip
def test_fp32_leaves_torchs_own_tf32_setting_and_one_key_changes_it(words: Any, matmuls: bool, convolutions: bool) -> None:
    precision_of(*words).setup()
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (matmuls, convolutions)


def test_the_plan_says_what_fp32_means_on_this_card(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Full().describe(CUDA).startswith("fp32, convolutions in tf32 as torch has it (precision.tf32=false: full fp32")
    assert Full(tf32=True).describe(CUDA) == "fp32 with tf32 matmuls"
    assert Full(tf32=False).describe(CUDA) == Full().describe(torch.device("cpu")) == "fp32"
    capability(monkeypatch, 7)
    assert Full().describe(CUDA) == "fp32"  # no tf32 before Ampere


def test_amp_is_bf16_where_the_card_has_it(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Autocast().compute_dtype(CUDA) == torch.bfloat16 and not Autocast().scaler(CUDA).is_enabled()
    assert "bfloat16 autocast, no loss scale (this device has bf16; precision.dtype=float16" in Autocast().describe(CUDA)
    capability(monkeypatch, 7)
    assert Autocast().compute_dtype(CUDA) == torch.float16
    assert Autocast().describe(CUDA) == (
        "fp32 weights, float16 autocast, dynamic loss scale from 65536 (this device has no bf16)"
    )


@pytest.mark.gpu_pretended(2)
def test_all_cards_of_all_ranks_take_the_same_type(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    capability(monkeypatch, 9, 7)
    both = [CUDA, torch.device("cuda", 1)]
    assert Autocast().settled(both, Ranks()).dtype == "float16"  # type: ignore[attr-defined]
    assert Autocast().settled(both[:1], Ranks()).dtype == "auto"  # type: ignore[attr-defined]
    asked: list[int] = []

    class Other(Ranks):
        def agree(self, value: int) -> int:
            asked.append(value)
            return 1  # a rank on an older card

    assert Autocast().settled(both[:1], Other(0, 2, 0, 2)).dtype == "float16" and asked == [0]  # type: ignore[attr-defined]
    assert Autocast(dtype="bfloat16").settled(both, Other(0, 2, 0, 2)).dtype == "bfloat16"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("words", "major", "wanted"), [
    (("precision=fp32",), 9, True), (("precision=fp32",), 7, False), (("precision=fp32", "precision.tf32=false"), 9, False),
    (("precision=bf16",), 9, True), (("precision=amp",), 7, True), (("precision=fp32", "channels_last=false"), 9, False),
    (("precision=fp32", "data=random_matrix", "model=linear"), 9, False),
])  # fmt: skip
def test_tensor_cores_get_channels_last(gpu: Any, words: Any, major: int, wanted: bool, monkeypatch: Any) -> None:
    capability(monkeypatch, major)
    config = configuration.load(plain(*([] if "data=random_matrix" in words else IMAGES), *words))
    assert hardware.wants_channels_last(config, CUDA) == wanted
    assert not hardware.wants_channels_last(config, torch.device("cpu"))


def test_a_teacher_works_in_the_layout_of_its_pupil(gpu: Any, tmp_path: Path) -> None:
    seen: list[bool] = []
    words = ("model=timm", "model.arch=test_resnet", "loss=distill", "loss.teacher.arch=test_resnet", "steps=1")
    original = torch.nn.Conv2d.forward

    def forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        if not self.weight.requires_grad and self.weight.shape[1] > 1:
            seen.append(self.weight.is_contiguous(memory_format=torch.channels_last))
        return original(self, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Conv2d, "forward", forward)
        train(tmp_path, *QUIET[:1], *QUIET[2:], *IMAGES, *words)
    assert seen and all(seen)


def test_a_run_that_began_in_fp16_goes_on_in_fp16_with_its_scale(gpu: Any, tmp_path: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as older:
        capability(older, 7)
        train(tmp_path / "old", *QUIET, "precision=amp", "steps=2")
    assert "float16" in plan(tmp_path / "old")["precision"]
    scales: list[float] = []
    train(tmp_path / "on", *QUIET, "precision=amp", "steps=3", f"resume={tmp_path / 'old'}",
          observe=lambda state, *_: scales.append(state.scaler.get_scale()))  # fmt: skip
    found = plan(tmp_path / "on")
    assert "float16 autocast, dynamic loss scale" in found["precision"] and scales == [65536.0]
    assert found["identity"]["precision"] == plan(tmp_path / "old")["identity"]["precision"].split(" (")[0]
    train(tmp_path / "typed", *QUIET, "precision=amp", "precision.dtype=bfloat16", "steps=3", f"resume={tmp_path / 'old'}")
    assert "bfloat16" in plan(tmp_path / "typed")["precision"]


def test_a_run_that_began_without_tf32_goes_on_without(gpu: Any, tmp_path: Path, caplog: Any) -> None:
    """tf32=false was the default once: the config of such a run says so, and a resume begins with it."""
    train(tmp_path / "old", *QUIET, "precision.tf32=false", "steps=1")
    train(tmp_path / "on", *QUIET, "steps=2", f"resume={tmp_path / 'old'}")
    assert torch.backends.cudnn.allow_tf32 is False and plan(tmp_path / "on")["precision"] == "fp32"
    caplog.clear()
    train(tmp_path / "typed", *QUIET, "precision.tf32=true", "steps=2", f"resume={tmp_path / 'old'}")
    assert torch.backends.cudnn.allow_tf32 is True
    assert 'the promise drops from "to the bit" to "same effective batch"' in caplog.text
    assert "precision fp32 -> fp32 with tf32 matmuls" in caplog.text


def test_fp16_goes_on_only_where_a_scale_was_kept_and_a_gpu_is_there() -> None:
    assert Full().as_begun(True, CUDA) == Autocast().as_begun(False, CUDA) == {}
    assert Autocast().as_begun(True, torch.device("cpu")) == {}  # on a CPU fp16 would be 25 times slower
    assert Autocast(dtype="bfloat16").as_begun(True, CUDA) == {} and Autocast().as_begun(True, CUDA) == {"dtype": "float16"}
