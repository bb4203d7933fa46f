"""Targets beyond one class of a sample: several labels, numbers, a class of each pixel."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from harness import plain, summary
from PIL import Image

from isobatch import config
from isobatch.augment.sample import SampleTransform
from isobatch.config import options
from isobatch.data import DataInfo
from isobatch.data.samples import Failure, Samples
from isobatch.errors import ConfigError
from isobatch.resume.signature import Signature
from isobatch.run import run_job
from isobatch.runtime.distributed import Ranks

SIDE = 32
CLASSES = ["paper", "ink"]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Four pictures of black and white quarters, a mask each, and csv files with two labels and a number."""
    draw = numpy.random.RandomState(0)
    for split in ("train", "val"):
        for kind in ("images", "masks"):
            (tmp_path / split / kind).mkdir(parents=True)
        with (tmp_path / f"{split}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["path", "left", "right", "ink"])
            for i in range(4):
                ink = numpy.kron(draw.rand(2, 2) > 0.5, numpy.ones((SIDE // 2, SIDE // 2))).astype(numpy.uint8)
                Image.fromarray(255 * ink).save(tmp_path / split / "images" / f"{i}.png")
                Image.fromarray(ink).save(tmp_path / split / "masks" / f"{i}.png")
                halves = ink[:, : SIDE // 2].any(), ink[:, SIDE // 2 :].any()
                table.writerow([f"{split}/images/{i}.png", *map(int, halves), ink.mean()])
    return tmp_path


def masks(root: Path, **more: Any) -> Any:
    known = {"name": "mask_folder", "root": str(root), "classes": CLASSES, "image_size": SIDE, "in_chans": 1}
    return options("data", known | more)


def table(root: Path, **more: Any) -> Any:
    return options("data", {"name": "csv", "root": str(root), "image_size": SIDE, "in_chans": 1} | more)


def test_a_mask_follows_its_image(pictures: Path) -> None:
    transform = SampleTransform(crop="resized", scale=(0.3, 1.0), flip=0.5, size=SIDE)
    data = masks(pictures).load(transform, 0).train.dataset
    for i in range(4):
        for seed in range(4):
            torch.manual_seed(seed)
            image, mask = data[i]
            assert image.shape == (1, SIDE, SIDE) and mask.shape == (SIDE, SIDE) and mask.dtype == torch.int64
            assert ((image[0] > 127) == mask.bool()).double().mean() > 0.9  # but for the soft edges of a resized image
    shifting = SampleTransform(crop="pad", padding=5, flip=0, size=SIDE)
    moved = masks(pictures).load(shifting, 0).train.dataset
    pairs = [moved[0] for _ in range(8)]
    for image, mask in pairs:  # black comes in, and counts nowhere
        inside = mask != -100
        assert torch.equal((image[0] > 127)[inside], mask.bool()[inside]) and not image[0][~inside].any()
    assert any((mask == -100).any() for _, mask in pairs)
    evaluation = masks(pictures).load(None, 0).eval
    image, mask = evaluation.dataset[0]
    assert torch.equal(image[0] > 127, mask.bool()) and evaluation.info.labels == "pixels"


def test_a_pixel_of_no_class_counts_nowhere(pictures: Path) -> None:
    path = pictures / "train" / "masks" / "2.png"
    values = numpy.array(Image.open(path))
    values[0, 0] = 255
    Image.fromarray(values).save(path)
    split = masks(pictures).load(None, 0).train
    assert split.dataset[2][1][0, 0] == -100
    found = Samples(masks(pictures, ignored=None).load(None, 0).train, 0).isolated((0, [2]))
    assert isinstance(found, Failure) and "2.png has the class 255, and the classes are 0 to 1" in found.line
    Image.fromarray(values[:5]).save(path)
    found = Samples(split, 0).isolated((0, [2]))
    assert isinstance(found, Failure) and "has 32 x 5 pixels" in found.line


def test_masks_that_are_not_there(pictures: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.classes=\[\]"):
        masks(pictures, classes=[]).check()
    (pictures / "val" / "masks" / "1.png").unlink()
    with pytest.raises(ConfigError, match=r"data\.root=.*val/images/1\.png has no mask of its name"):
        masks(pictures).check()
    (pictures / "val" / "images" / "1.png").unlink()
    with pytest.raises(ConfigError, match=r"augment\.name=.*moves pixels"):
        masks(pictures).load(SampleTransform(policy="rand-m9"), 0)


def test_columns_are_labels_or_numbers(pictures: Path) -> None:
    several = table(pictures, label_columns=["left", "right"]).load(None, 0)
    assert several.info.labels == "several" and several.info.class_names == ("left", "right")
    image, labels = several.train.dataset[0]
    assert labels.dtype == torch.float32 and labels.tolist() == several.train.targets()[0].tolist() and len(image) == 1
    numbers = table(pictures, target_columns=["ink"]).load(None, 0)
    assert (numbers.info.num_classes, numbers.info.outputs) == (0, 1)
    network = config.load(plain("model=timm", "model.arch=test_resnet")).model.build(numbers.info)
    assert network(torch.zeros(2, 1, SIDE, SIDE)).shape == (2, 1)
    with pytest.raises(ConfigError, match=r"data\.train_csv=.*line 2 has .* where 0 or 1 has to be"):
        table(pictures, label_columns=["path"]).check()
    with pytest.raises(ConfigError, match=r"data\.target_columns=.*beside data\.label_columns"):
        table(pictures, label_columns=["left"], target_columns=["ink"])
    with pytest.raises(ConfigError, match=r"data\.label_columns=up:"):
        table(pictures, label_columns=["up"]).check()


WORDS = ("logger=none", "threads=1", "epochs=null", "steps=2", "log_every=1", "eval_every=2", "batch.effective=4",
         "data.num_workers=0", "data.image_size=32", "data.in_chans=1", "data.crop_pct=1.0")  # fmt: skip


def test_several_labels_are_each_for_itself(pictures: Path, tmp_path: Path) -> None:
    words = (*WORDS, "data=csv", f"data.root={pictures}", "data.label_columns=[left,right]", "model=mlp", "model.width=8")
    with pytest.raises(ConfigError, match=r"loss\.name=cross_entropy: is about one class of a sample"):
        run_job(plain(*words), tmp_path / "refused", Ranks())
    run_job(plain(*words, "loss=bce", "checkpoint.best=eval/map"), tmp_path / "run", Ranks())
    assert {"eval/map", "eval/f1", "eval/loss"} <= set(summary(tmp_path / "run")["final"])
    words = ("task=predict", f"resume={tmp_path / 'run'}", f"predict.path={pictures / 'val' / 'images'}", "predict.top=2")
    run_job(plain(*words, "logger=none", "threads=1", "data.num_workers=0"), tmp_path / "said", Ranks())
    with (tmp_path / "said" / "predictions.csv").open() as file:
        lines = list(csv.DictReader(file))
    both = [float(line["probability"]) + float(line["probability_2"]) for line in lines]
    assert len(both) == 4 and any(abs(value - 1) > 1e-3 for value in both)


def test_a_checkpoint_says_what_kind_of_labels(tmp_path: Path) -> None:
    info = DataInfo("x", (3, 8, 8), 2, class_names=("a", "b"), labels="several")
    assert Signature.read(Signature.of(info).facts()) == Signature.of(info)
    numbers = dataclasses.replace(info, num_classes=0, class_names=(), labels="one", outputs=3)
    assert Signature.read(Signature.of(numbers).facts()).outputs == 3
