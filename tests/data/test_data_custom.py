"""A user's own parts: registered, typed, refused in one line where they do not fit; the example trains."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import plain, summary
from torch import nn

import isobatch
from isobatch import data, model, sampler
from isobatch.config import options
from isobatch.data import DataInfo
from isobatch.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model"


pytestmark = pytest.mark.usefixtures("tables_as_before")


def test_a_plain_function_becomes_options_with_kwargs() -> None:
    isobatch.register("model", "mine", lambda num_classes, in_chans, width=3: nn.Linear(in_chans * width, num_classes))
    assert "mine" in model.TABLE
    info = DataInfo("x", (2, 4, 4), 5)
    built = options("model", {"name": "mine", "kwargs": {"width": 7}}).build(info)
    assert (built.in_features, built.out_features) == (14, 5)
    with pytest.raises(ConfigError, match=r"model\.kwargs=.*mine cannot be called with them .*'depth'"):
        options("model", {"name": "mine", "kwargs": {"depth": 7}}).build(info)
    with pytest.raises(ConfigError, match=r"model\.batch_norm=free"):
        options("model", {"name": "mine", "batch_norm": "free"})


def test_an_options_class_joins_as_it_is() -> None:
    @isobatch.register("sampler", "backwards")
    @dataclass(frozen=True)
    class Backwards:
        name: str = "backwards"
        tail: str = "keep"

    assert sampler.TABLE["backwards"] is Backwards
    assert type(options("sampler", {"name": "backwards"})) is Backwards


def test_what_cannot_join_is_refused() -> None:
    with pytest.raises(KeyError, match="no group 'models'"):
        isobatch.register("models", "mine", nn.Linear)
    with pytest.raises(ValueError, match="isobatch's own"):
        isobatch.register("model", "timm", nn.Linear)
    with pytest.raises(TypeError, match="options dataclass"):
        isobatch.register("checkpoint", "mine", lambda: None)
    isobatch.register("model", "again", nn.Linear)
    isobatch.register("model", "again", nn.Bilinear)  # a module that is loaded anew


def test_a_sampler_function_gives_an_order() -> None:
    isobatch.register("sampler", "reverse", lambda epoch, n, seed: range(n - 1, -1, -1))
    isobatch.register("sampler", "short", lambda epoch, n, seed: [0])
    none: Any = None
    assert options("sampler", {"name": "reverse"}).order(0, 4, 0, none).tolist() == [3, 2, 1, 0]
    with pytest.raises(ConfigError, match="return 4 indices"):
        options("sampler", {"name": "short"}).order(0, 4, 0, none)


class Images:
    """Drawn in the constructor, which has to give the same on every rank."""

    def __init__(self, split: str, n: int = 6, labels: str = "int"):
        self.images = torch.randint(0, 256, (n, 3, 4, 4), dtype=torch.uint8)
        self.targets = [i % 3 for i in range(n)] if labels == "int" else [i / 2 for i in range(n)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, Any]:
        return self.images[index], self.targets[index]


class Rows(list):  # of (vector, class)
    def __init__(self, split: str):
        super().__init__([(torch.zeros(3, 2, 2), 0)] * 2)


class Swapped(Rows):
    def __init__(self, split: str):
        super().__init__(split)
        self.classes = ["a", "b"] if split == "train" else ["b", "a"]


def test_a_dataset_function_gives_two_splits_and_what_a_model_needs() -> None:
    for name, dataset in (("toy_images", Images), ("toy_rows", Rows), ("toy_swapped", Swapped)):
        isobatch.register("data", name, dataset)
    before = torch.get_rng_state()
    one, other = (options("data", {"name": "toy_images"}).load(None, 4) for _ in range(2))
    assert torch.get_rng_state().equal(before), "the run's generator was drawn from"
    assert one.train.dataset.images.equal(other.train.dataset.images)
    assert not one.train.dataset.images.equal(one.eval.dataset.images)
    assert one.info == DataInfo("toy_images", (3, 4, 4), 3, (0.0,) * 3, (1.0,) * 3), "pixels are scaled to 0 .. 1"
    assert one.train.targets().tolist() == [0, 1, 2, 0, 1, 2]
    assert options("data", {"name": "toy_images", "kwargs": {"labels": "float"}}).load(None, 0).info.num_classes == 0
    assert options("data", {"name": "toy_images", "num_classes": 9}).load(None, 0).info.num_classes == 9
    flipped = options("data", {"name": "toy_images"}).load(lambda image: 255 - image, 4)
    assert flipped.train.dataset[2][0].equal(255 - one.train.dataset[2][0])
    assert flipped.eval.dataset[2][0].equal(one.eval.dataset[2][0]), "the evaluation is not augmented"
    for kwargs, says in (({"n": 0}, "train split is empty"), ({"m": 1}, "cannot be called with them")):
        with pytest.raises(ConfigError, match=says):
            options("data", {"name": "toy_images", "kwargs": kwargs}).load(None, 0)
    for values, key in (({"num_classes": -1}, "num_classes"), ({"mean": [float("nan")]}, "mean"), ({"std": [0.0]}, "std"),
                        ({"mean": [0.5, 0.5]}, "mean")):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"data\.{key}="):
            options("data", {"name": "toy_images", **values}).load(None, 0)
    with pytest.raises(ConfigError, match=r"^data\.mean=.*its inputs are torch.float32"):
        options("data", {"name": "toy_rows", "mean": [0.5]}).load(None, 0)
    with pytest.raises(ConfigError, match=r"its eval split has the classes b, a, and its train split a, b"):
        options("data", {"name": "toy_swapped"}).load(None, 0)
    isobatch.register("data", "number", lambda split: 3)
    with pytest.raises(ConfigError, match=r"data\.name=number: its train split has no len"):
        options("data", {"name": "number"}).load(None, 0)
    assert set(data.TABLE) >= {"toy_images", "number", "image_folder"}


def test_the_example_trains_with_its_own_model_data_and_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isobatch import run
    from isobatch.runtime.distributed import Ranks

    monkeypatch.syspath_prepend(str(EXAMPLE))
    sys.modules.pop("parts", None)
    importlib.invalidate_caches()
    assert len((EXAMPLE / "parts.py").read_text().splitlines()) <= 60
    words = ["imports=[parts]", "model=custom", "model.name=small_cnn", "+model.kwargs.width=8", "data=custom",
             "data.name=stripes", "loss=custom", "loss.name=soft_margin", "epochs=4", "batch.effective=32", "logger=none",
             "optimizer.lr=0.01", "data.num_workers=0", "threads=1"]  # fmt: skip
    run.run_job(plain(*words), tmp_path, Ranks())
    assert summary(tmp_path)["final"]["eval/accuracy"] > 0.9


class HeldRows:
    """30 rows, whose first number says which one it is; every third is of class 1."""

    classes = ("most", "few")

    def __init__(self, split: str, labelled: bool = True):
        assert split == "train", "the split of its own is not asked for"
        self.rows = torch.arange(60.0).view(30, 2)
        if labelled:
            self.targets = (torch.arange(30) % 3 == 0).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], int(index % 3 == 0)

    def describe(self, index: int) -> str:
        return f"row {index}"


def test_samples_of_ones_own_are_held_out() -> None:
    isobatch.register("data", "own_rows", HeldRows)
    seen: list[float] = []
    for fold in range(5):
        splits = options("data", {"name": "own_rows", "fold": fold, "folds": 5}).load(None, 0)
        assert splits.info.num_classes == 2 and splits.info.class_names == ("most", "few")
        assert splits.eval.targets().bincount().tolist() == [4, 2] and splits.train.targets().bincount().tolist() == [16, 8]
        for split in (splits.train, splits.eval):
            assert [split.dataset[i][1] for i in range(len(split))] == split.targets().tolist()
        assert splits.eval.describe(0) == f"sample 0 (row {int(splits.eval.dataset[0][0][0]) // 2})"
        seen += [float(splits.eval.dataset[i][0][0]) for i in range(6)]
    assert sorted(seen) == [2.0 * i for i in range(30)]
    loose = options("data", {"name": "own_rows", "holdout": 0.2, "kwargs": {"labelled": False}}).load(None, 0)
    assert (len(loose.train), len(loose.eval)) == (24, 6)
