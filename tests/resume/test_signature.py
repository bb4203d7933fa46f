"""Weights know their classes and their images: compared wherever they meet data, whatever the shapes say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from harness import rows, train
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from isobatch import checkpoint
from isobatch.config import options
from isobatch.data import DataInfo
from isobatch.errors import ConfigError
from isobatch.resume import signature
from isobatch.resume import teacher as teachers
from isobatch.resume.signature import Signature

WORDS = ("logger=none", "threads=1", "model=mlp", "model.width=16", "model.depth=1", "data=image_folder", "data.image_size=16",
         "data.num_workers=0", "batch.effective=6", "scheduler=constant", "optimizer.lr=0.01")  # fmt: skip
COLOURS = {"ape": (200, 30, 30), "bee": (30, 200, 30), "cat": (30, 30, 200), "zebra": (200, 30, 30)}


def coloured(root: Path, names: tuple[str, ...], per_class: int = 4) -> Path:
    """Plain colours, one for each class, so that a few steps are enough."""
    for split in ("train", "val"):
        for name in names:
            (root / split / name).mkdir(parents=True)
            for i in range(per_class):
                pixels = numpy.clip(numpy.array(COLOURS[name]) + 8 * i, 0, 255).astype("uint8")
                Image.fromarray(numpy.full((16, 16, 3), pixels, "uint8")).save(root / split / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `data` (ape, bee, cat) and `run`, which knows them."""
    base = tmp_path_factory.mktemp("trained")
    coloured(base / "data", ("ape", "bee", "cat"))
    train(base / "run", *WORDS, f"data.root={base / 'data'}", "epochs=null", "steps=30", "eval_every=30")
    assert rows(base / "run", "eval/accuracy")[-1] == 1.0
    return base


def again(trained: Path, folder: Path, root: Path, *words: str) -> Any:
    return train(folder, *WORDS, f"data.root={root}", f"resume={trained / 'run'}", "epochs=null", *words)


@pytest.mark.parametrize("words", [("task=evaluate", "steps=30"), ("steps=32",)])
def test_classes_of_other_names_are_refused_with_both_lists(trained: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    root = coloured(tmp_path / "data", ("bee", "cat", "zebra"))  # `ape` renamed: every class moves
    says = r"^data\.root=.*its classes are bee, cat, zebra, and those of the weights ape, bee, cat .*checkpoint_path="
    with pytest.raises(ConfigError, match=says):
        again(trained, tmp_path / "a", root, *words)
    again(trained, tmp_path / "b", root, *words, "allow_contract_change=true")


def test_fewer_classes_are_refused_by_number(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has 2 classes, and the weights know 3 classes"):
        again(trained, tmp_path / "a", coloured(tmp_path / "data", ("ape", "cat")), "task=evaluate", "steps=30")


def test_the_same_data_elsewhere_is_the_same(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "data", tmp_path / "copy")
    again(trained, tmp_path / "a", tmp_path / "copy", "task=evaluate", "steps=30")
    assert rows(tmp_path / "a", "eval/accuracy") == [1.0]


def test_images_normalised_otherwise_are_refused_and_the_way_out_is_one(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.mean=.*normalised with mean \[0, 0, 0\].*and the weights know") as refusal:
        again(trained, tmp_path / "a", trained / "data", "task=evaluate", "steps=30", "data.mean=[0,0,0]", "data.std=[1,1,1]")
    typed = refusal.value.way_out.removeprefix("set ").split(", or")[0].split()
    again(trained, tmp_path / "b", trained / "data", "task=evaluate", "steps=30", *typed)
    assert rows(tmp_path / "b", "eval/accuracy") == [1.0]


def test_an_evaluation_of_another_size_is_told(trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    facts = Signature(("a", "b"), 2, (0.5,), (0.5,), (1, 8, 8), None, 0.875, "bilinear").facts()
    data = options("data", {"name": "image_folder", "root": "r"})
    said = signature.compare(facts, {**facts, "crop_pct": 1.0, "eval_size": 16}, data, tmp_path, False, True)
    assert said == ["evaluated with eval_size 16, trained with null", "evaluated with crop_pct 1.0, trained with 0.875"]
    assert signature.compare(facts, {**facts, "crop_pct": 1.0}, data, tmp_path, False, False) == []


def test_an_old_checkpoint_is_taken_and_it_is_said(tmp_path: Path) -> None:
    now = Signature(("a", "b"), 2, (0.5,), (0.5,), (1, 8, 8)).facts()
    data = options("data", {"name": "image_folder", "root": "r"})
    for before in ({}, {"num_classes": 2, "class_names": []}, {"num_classes": 2, "class_names": [1, 2]}, {"class_names": "ab"}):
        (said,) = signature.compare(before, now, data, tmp_path, False, False)
        assert "does not say which class" in said and str(tmp_path) in said


def test_the_weights_file_says_what_it_knows(trained: Path) -> None:
    with safe_open(trained / "run/checkpoints/last/model.safetensors", "pt") as file:
        found = Signature.from_metadata(file.metadata())
    assert found is not None and found.class_names == ("ape", "bee", "cat")
    assert found.mean == pytest.approx((0.485, 0.456, 0.406))
    assert (found.input_shape, found.crop_pct, found.interpolation) == ((3, 16, 16), 0.875, "bilinear")
    for text in ("", "[1]", "{}", "nonsense", "[" * 10000, json.dumps({"class_names": [3], "num_classes": 1})):
        assert Signature.from_metadata({"isobatch": text}) is None
    hostile = {"class_names": ["a"], "num_classes": 1, "mean": [True, "x"], "std": [0.0], "input_shape": [{}], "crop_pct": "y"}
    assert Signature.read(hostile) == Signature(("a",), 1)


def timm_run(folder: Path, root: Path) -> Path:
    train(folder, *WORDS[:2], "model=timm", "model.arch=test_resnet", *WORDS[5:], f"data.root={root}", "epochs=null", "steps=1")
    return folder


def test_first_weights_keep_a_classifier_of_the_same_classes_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "isobatch")
    run = timm_run(tmp_path / "run", coloured(tmp_path / "data", ("ape", "bee", "cat")))
    saved = load_file(run / "checkpoints/last/model.safetensors")
    node = {"name": "timm", "arch": "test_resnet", "checkpoint_path": str(run)}

    def built(*names: str, mean: tuple[float, ...] = (0.485, 0.456, 0.406)) -> dict[str, torch.Tensor]:
        caplog.clear()
        info = DataInfo("x", (3, 16, 16), 3, mean, (0.229, 0.224, 0.225), names)
        return options("model", node).build(info).state_dict()  # type: ignore[no-any-return]

    assert torch.equal(built("ape", "bee", "cat")["fc.weight"], saved["fc.weight"]) and not caplog.messages
    assert torch.equal(built("cat", "ape", "bee")["fc.weight"], saved["fc.weight"][[2, 0, 1]])
    assert torch.equal(built("cat", "ape", "bee")["fc.bias"], saved["fc.bias"][[2, 0, 1]])
    other = built("bee", "cat", "zebra")  # as many, but others: the shapes fit
    assert torch.equal(other["conv1.0.weight"], saved["conv1.0.weight"])
    assert not torch.equal(other["fc.weight"], saved["fc.weight"])
    assert "is new (its classes are bee, cat, zebra, and those of the weights ape, bee, cat)" in caplog.text
    built("ape", "bee", "cat", mean=(0.5, 0.5, 0.5))
    assert "images are normalised with mean [0.5, 0.5, 0.5]" in caplog.text
    bare = tmp_path / "bare.safetensors"
    save_file(saved, bare, metadata={"format": "pt"})
    node["checkpoint_path"] = str(bare)
    assert torch.equal(built("bee", "cat", "zebra")["fc.weight"], saved["fc.weight"])
    assert f"{bare} does not say which class" in caplog.text


def teacher_of(trained: Path, **info: Any) -> torch.nn.Module:
    given = DataInfo("x", (3, 16, 16), 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), ("ape", "bee", "cat"))
    chosen = {"arch": None, "pretrained": False, "checkpoint": str(trained / "run"), "kwargs": {}}
    return teachers.build(chosen, DataInfo(**{**given.__dict__, **info}), torch.device("cpu"))


def test_a_teacher_sees_images_as_it_learned_them(trained: Path) -> None:
    """The same pixels reach it in four dresses: its answers stay, but for rounding."""
    pixels = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))

    def dressed(mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
        return (pixels - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)

    own = teacher_of(trained)
    assert type(own).__name__ == "Sequential"  # nothing is put around one that knows the data as it is
    expected = own(dressed((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    mean, std = (0.1, 0.9, 0.4), (0.02, 0.5, 3.0)
    assert torch.allclose(teacher_of(trained, mean=mean, std=std)(dressed(mean, std)), expected, atol=1e-4)
    moved = teacher_of(trained, class_names=("cat", "ape", "bee"))
    assert torch.equal(moved(dressed((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))), expected[:, [2, 0, 1]])
    larger = teacher_of(trained, shape=(3, 32, 32))
    assert larger(torch.zeros(2, 3, 32, 32)).shape == (2, 3)  # an MLP of 16 x 16 pixels takes no others
    assert not any(p.requires_grad for p in moved.parameters()) and not moved.training


def test_a_teacher_of_other_classes_is_refused(trained: Path) -> None:
    with pytest.raises(ConfigError, match=r"^loss\.teacher\.checkpoint=.*its classes are ape, bee, fox, and those of the w"):
        teacher_of(trained, class_names=("ape", "bee", "fox"))
    with pytest.raises(ConfigError, match="it has 2 classes, and the weights know 3"):
        teacher_of(trained, class_names=("ape", "bee"), num_classes=2)


def test_a_teacher_trained_under_another_normalisation_teaches(trained: Path, tmp_path: Path) -> None:
    """All of the loss is the teacher's: a student that learns from it alone ends where the teacher is."""
    train(tmp_path / "student", *WORDS, f"data.root={trained / 'data'}", "loss=distill", "loss.weight=1", "epochs=null",
          "steps=40", f"loss.teacher.checkpoint={trained / 'run'}", "data.mean=[0.9,0.9,0.9]", "data.std=[0.05,0.05,0.05]",
          "eval_every=40")  # fmt: skip
    assert rows(tmp_path / "student", "eval/accuracy")[-1] == 1.0


def test_a_pretrained_teacher_of_timm_knows_its_own_classes_and_images(tmp_path: Path) -> None:
    timm: Callable[..., Any] = __import__("timm").create_model
    torch.save(timm("test_resnet", num_classes=3).state_dict(), tmp_path / "w.pth")
    cfg = {"file": str(tmp_path / "w.pth"), "num_classes": 3, "mean": (0.1, 0.1, 0.1), "std": (0.3, 0.3, 0.3)}
    chosen = {"arch": "test_resnet", "pretrained": True, "checkpoint": None, "kwargs": {"pretrained_cfg_overlay": cfg}}
    info = DataInfo("x", (3, 32, 32), 3, (0.5,) * 3, (0.25,) * 3, ("a", "b", "c"))
    teacher = teachers.build(chosen, info, torch.device("cpu"))
    pixels = torch.rand(2, 3, 32, 32)
    plain = timm("test_resnet", num_classes=3).eval()
    plain.load_state_dict(torch.load(tmp_path / "w.pth", weights_only=True))
    assert torch.allclose(teacher((pixels - 0.5) / 0.25), plain((pixels - 0.1) / 0.3), atol=1e-4)
    with pytest.raises(ConfigError, match=r"^loss\.teacher\.pretrained=True: the pretrained test_resnet knows 3 classes"):
        teachers.build(chosen, DataInfo("x", (3, 32, 32), 5), torch.device("cpu"))


def test_the_state_says_it_too(trained: Path) -> None:
    plan = checkpoint.load(trained / "run")["plan"]
    assert plan["class_names"] == ["ape", "bee", "cat"] and plan["eval_size"] is None and plan["crop_pct"] == 0.875
