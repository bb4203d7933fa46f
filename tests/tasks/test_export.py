"""`task=export`: files that answer as the checkpoint's model does, and one line where that fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from harness import BASE, train
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import isobatch
from isobatch import checkpoint
from isobatch.checkpoint import Saved
from isobatch.errors import ConfigError
from isobatch.resume import rebuild
from isobatch.tasks import exporting as export

SHORT = ("logger=none", "threads=1", "epochs=null", "steps=3", "batch.effective=16", "scheduler=constant")


def exported(run: Path, folder: Path, *words: str) -> dict[str, Any]:
    train(folder, *words, "task=export", f"resume={run}")
    return json.loads((folder / "export/export.json").read_text())


@pytest.mark.slow
def test_a_timm_model_without_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = tmp_path / "photos"
    for split in ("train", "val"):
        for number, label in enumerate(("cat", "dog")):
            (photos / split / label).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (20, 20), (80 * i, 90 * number, 20)).save(photos / split / label / f"{i}.png")
    words = (*SHORT, "batch.effective=6", "data=image_folder", f"data.root={photos}", "data.image_size=48", "model=timm",
             "data.eval_size=64", "data.crop_pct=0.9", "data.interpolation=bicubic",
             "data.num_workers=0", "model.arch=test_resnet", "ema=ema", "ema.decay=0.9", "precision=O2",
             "optimizer.lr=0.1")  # fmt: skip
    train(tmp_path / "run", *words)
    shutil.rmtree(photos)
    facts = exported(tmp_path / "run", tmp_path / "out", *words)
    assert facts["weights"] == "ema" and facts["classes"] == ["cat", "dog"]
    assert facts["input"]["shape"] == ["batch", 3, 48, 48] and facts["input"]["mean"] == [0.485, 0.456, 0.406]
    folder = tmp_path / "out/export"
    average = checkpoint.load(tmp_path / "run")["ema"]
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert model.pretrained_cfg["label_names"] == ["cat", "dog"]
    seen = timm.data.resolve_data_config(model=model, use_test_size=True)  # what timm's validate.py does with a folder
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in seen.items()} == {
        "input_size": [3, 64, 64], "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center",
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}  # fmt: skip
    assert all(torch.equal(tensor, average[name]) for name, tensor in model.state_dict().items())
    inputs = torch.randn(5, 3, 48, 48)
    program = torch.export.load(folder / "model.pt2").module()
    with torch.no_grad():
        torch.testing.assert_close(program(inputs), model(inputs), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(export, "save_program", lambda model, *rest: model)  # it takes seconds, and was looked at
    raw = exported(tmp_path / "run", tmp_path / "raw", *words, "checkpoint.weights=raw")
    assert raw["weights"] == "raw"
    written = load_file(tmp_path / "raw/export/model.safetensors")
    assert torch.equal(written["fc.weight"], checkpoint.load(tmp_path / "run")["model"]["fc.weight"])
    assert not torch.equal(written["fc.weight"], average["fc.weight"])


def test_onnx_answers_alike(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    train(tmp_path / "run", *BASE, "epochs=null", "steps=2")
    exported(tmp_path / "run", tmp_path / "out", *BASE)
    inputs = torch.rand(4, 1, 8, 8)
    (found,) = ReferenceEvaluator(str(tmp_path / "out/export/model.onnx")).run(None, {"images": inputs.numpy()})
    program = torch.export.load(tmp_path / "out/export/model.pt2").module()
    torch.testing.assert_close(torch.tensor(found), program(inputs).detach(), rtol=1e-4, atol=1e-5)


class Choosy(nn.Module):
    """Goes one way or the other by its input's values: no tracer can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.layer(inputs.flatten(1))
        return output if output.sum().item() > 0 else -output


def test_a_model_that_cannot_be_traced_and_one_that_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isobatch import model

    if "choosy" not in model.TABLE:
        isobatch.register("model", "choosy", lambda num_classes, in_chans: Choosy())
    words = (*SHORT, "model=custom", "model.name=choosy")
    train(tmp_path / "run", *words)
    with pytest.raises(ConfigError, match=r"^model\.name=choosy: torch\.export cannot .*model\.safetensors") as refusal:
        exported(tmp_path / "run", tmp_path / "out", *words)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 600
    assert load_file(tmp_path / "out/export/model.safetensors")["layer.bias"].shape == (10,)
    monkeypatch.delitem(model.TABLE, "choosy")
    with pytest.raises(ConfigError, match=r"^model\.name=choosy: no such model; .*type imports="):
        train(tmp_path / "again", *SHORT, "task=export", f"resume={tmp_path / 'run'}")


def test_without_onnx_one_line_and_a_file_that_answers_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "run", *BASE, "epochs=null", "steps=2")
    monkeypatch.setattr(export, "ONNX", ("no_such_onnx",))
    monkeypatch.setattr(export, "save_program", lambda model, *rest: model)
    with caplog.at_level("INFO", logger="isobatch"):
        facts = exported(tmp_path / "run", tmp_path / "out", *BASE)
    assert set(facts["largest_difference"]) == {"model.safetensors", "model.pt2"}
    assert [m for m in caplog.messages if "(no_such_onnx): pip install 'isobatch[onnx]'" in m]
    monkeypatch.setattr(export, "save_program", lambda model, *rest: lambda inputs: 1.01 * model(inputs))
    with pytest.raises(ConfigError, match=r"model\.pt2 answers otherwise than the model on a batch of 1"):
        exported(tmp_path / "run", tmp_path / "worse", *BASE)


@pytest.mark.parametrize("shape", [None, [], [0], [2**40, 2], ["8"], [True, 3], "888"])
def test_a_checkpoint_cannot_ask_for_more_than_a_sample(shape: Any) -> None:
    saved = Saved(Path("run/checkpoints/last"), 1, {"plan": {"input_shape": shape, "num_classes": 3}})
    with pytest.raises(ConfigError, match="nothing sound"):
        rebuild.data_info(saved)


def test_what_timm_would_guess_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images in memory are neither cropped nor normalised by ImageNet's numbers, which timm falls back on."""
    monkeypatch.setattr(export, "save_program", lambda model, *rest: model)
    monkeypatch.setattr(export, "save_onnx", lambda model, *rest: model)
    words = (*SHORT, "steps=1", "data=synthetic", "data.samples=16", "data.eval_samples=4", "data.image_size=16", "model=timm",
             "model.arch=test_resnet")  # fmt: skip
    train(tmp_path / "run", *words)
    exported(tmp_path / "run", tmp_path / "out")
    model = timm.create_model(f"local-dir:{tmp_path / 'out/export'}", pretrained=True)
    seen = timm.data.resolve_data_config(model=model)
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    assert (tuple(seen["mean"]), tuple(seen["std"]), seen["crop_pct"], seen["interpolation"]) == (mean, std, 1.0, "bilinear")
