"""Images as the first weights know them, where nothing is stated; and an evaluation of weights without a run."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import plain, summary, train
from PIL import Image

from isobatch.config import load
from isobatch.errors import ConfigError
from isobatch.resume import contract, weights_know
from isobatch.runtime.timm_import import timm

BARE = ("logger=none", "threads=1", "model=timm", "model.arch=test_resnet", "data=image_folder", "data.num_workers=0",
        "batch.effective=6", "batch.shard=3", "scheduler=constant")  # fmt: skip
SHORT = (*BARE, "epochs=null", "steps=1")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 4), ("val", 2)):
        for k, colour in enumerate(("blue", "green", "red")):
            (root / split / colour).mkdir(parents=True)
            for i in range(count):
                image = Image.effect_noise((44 + i, 40), 60 + 20 * k).convert("RGB")
                image.save(root / split / colour / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides of timm's pretrained test_resnet, its weights in a file instead of on the hub."""
    torch.manual_seed(1)
    model = timm.create_model("test_resnet", num_classes=3)
    file = tmp_path_factory.mktemp("hub") / "w.pth"
    torch.save(model.state_dict(), file)
    cfg = {"file": str(file), "num_classes": 3, "mean": "[0.5, 0.4, 0.3]", "std": "[0.2, 0.25, 0.3]",
           "input_size": "[3, 32, 32]", "test_input_size": "[3, 40, 40]",
           "crop_pct": 0.9, "test_crop_pct": 0.95, "interpolation": "bicubic"}  # fmt: skip
    overlay = "{" + ", ".join(f"{key}: {value}" for key, value in cfg.items()) + "}"
    return "model.pretrained=true", f"+model.kwargs.pretrained_cfg_overlay={overlay}"


def facts(folder: Path) -> dict[str, Any]:
    state = torch.load(folder / "checkpoints/last/state.pt", weights_only=True)
    return {key: state["plan"][key] for key in ("input_shape", "eval_size", "crop_pct", "interpolation", "mean", "std")}


def test_an_evaluation_without_a_run_is_timms_own(photos: Path, pretrained: tuple[str, ...], tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.INFO):
        train(tmp_path / "out", *BARE, *pretrained, f"data.root={photos}", "task=evaluate")
    assert "images as the weights know them (timm's test_resnet" in caplog.text
    assert "image_size 40, crop_pct 0.95" in caplog.text
    model = timm.create_model("test_resnet", pretrained=True, num_classes=3,
                              **load(plain(*BARE, *pretrained)).model.kwargs).eval()  # fmt: skip
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model, use_test_size=True))
    with (tmp_path / "out/predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        with Image.open(row["file"]) as image, torch.no_grad():
            said = model(transform(image.convert("RGB")).unsqueeze(0)).softmax(1)[0]
        # timm resizes and then crops, here the crop is resized: pixels differ a little at its edge, and by rounding
        assert float(row["probability"]) == pytest.approx(float(said.max()), abs=0.02)
    final = summary(tmp_path / "out")["final"]
    assert final["eval/samples"] == 6 and {"eval/balanced_accuracy", "eval/accuracy"} <= set(final)
    about = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert about["checkpoint"] == "timm's test_resnet" and len(about["classes"]) == 3


def test_a_training_takes_the_weights_settings_and_what_is_stated_wins(photos: Path, pretrained, tmp_path: Path) -> None:
    root = f"data.root={photos}"
    train(tmp_path / "own", *SHORT, *pretrained, root)
    assert facts(tmp_path / "own") == {"input_shape": [3, 32, 32], "eval_size": None, "crop_pct": 0.9,
                                       "interpolation": "bicubic", "mean": [0.5, 0.4, 0.3],
                                       "std": [0.2, 0.25, 0.3]}  # fmt: skip
    train(tmp_path / "stated", *SHORT, *pretrained, root, "data.mean=[0.1,0.2,0.3]", "data.std=[1,1,1]", "data.image_size=24")
    stated = facts(tmp_path / "stated")
    assert (stated["input_shape"], stated["mean"], stated["std"]) == ([3, 24, 24], [0.1, 0.2, 0.3], [1, 1, 1])
    assert stated["crop_pct"] == 0.9
    # another run that begins with the first one's weights, and one that goes on from it
    train(tmp_path / "next", *SHORT, root, f"model.checkpoint_path={tmp_path / 'own'}")
    assert facts(tmp_path / "next") == facts(tmp_path / "own")
    train(tmp_path / "on", "logger=none", f"resume={tmp_path / 'stated'}", "steps=2")
    assert facts(tmp_path / "on") == stated
    train(tmp_path / "evaluated", *BARE, root, "task=evaluate", f"resume={tmp_path / 'own'}")
    assert json.loads((tmp_path / "evaluated/evaluation.json").read_text())["step"] == 1


def test_without_weights_nothing_changes(photos: Path, tmp_path: Path) -> None:
    train(tmp_path / "plain", *SHORT, f"data.root={photos}", "data.image_size=16")
    imagenet = {"mean": pytest.approx([0.485, 0.456, 0.406]), "std": pytest.approx([0.229, 0.224, 0.225])}
    assert facts(tmp_path / "plain") == {"input_shape": [3, 16, 16], "eval_size": None, "crop_pct": 0.875,
                                         "interpolation": "bilinear", **imagenet}  # fmt: skip
    options = load(plain("data=image_folder", f"data.root={photos}")).data.settled({})
    assert (options.image_size, options.crop_pct, options.interpolation, options.mean) == (224, 0.875, "bilinear", None)
    before = {
        "data": {
            "name": "image_folder",
            "image_size": 224,
            "crop_pct": 0.875,
            "interpolation": "bilinear",
            "mean": None,
            "exif": "apply",
        }
    }
    assert contract.differences(before, {"data": plain("data=image_folder")["data"]}) == []
    assert contract.differences(before, {"data": plain("data=image_folder", "data.crop_pct=1")["data"]}) != []


def test_weights_of_other_classes_are_no_evaluation(photos: Path, pretrained, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    for split in ("train", "val"):
        for name in ("blue", "green"):
            (tmp_path / "two" / split / name).mkdir(parents=True)
            Image.new("RGB", (40, 40)).save(tmp_path / "two" / split / name / "a.png")
    with pytest.raises(ConfigError, match=r"^model\.pretrained=True: data=image_folder: it has 2 classes, and .* know 3"):
        train(tmp_path / "out", *BARE, *pretrained, f"data.root={tmp_path / 'two'}", "task=evaluate")
    with pytest.raises(ConfigError, match=r"^resume=null: task=evaluate needs a run to evaluate, or trained weights"):
        train(tmp_path / "none", *BARE, f"data.root={photos}", "task=evaluate")


def test_what_timm_lists_is_told() -> None:
    known = weights_know.of_timm("resnet18.a1_in1k", {}, True)
    assert known.settings() == {"image_size": 288, "crop_pct": 1.0, "interpolation": "bicubic",
                                "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}  # fmt: skip
    assert weights_know.of_timm("resnet18.a1_in1k", {}, False).settings()["image_size"] == 224
    assert len(known.signature.class_names) == 1000 and known.signature.class_names[0].startswith("tench")
    assert weights_know.of_timm("vit_base_patch16_224", {"img_size": 160}, False).settings()["image_size"] == 160
    odd_cfg = {"crop_mode": "squash", "interpolation": "lanczos"}
    odd = weights_know.of_timm("resnet18", {"pretrained_cfg_overlay": odd_cfg}, False)
    assert len(odd.told) == 2 and odd.settings()["interpolation"] == "bicubic"
