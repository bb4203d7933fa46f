"""Which samples are trained on, evaluated on and kept for a test: shares, folds, class maps, third splits, mirrored views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from harness import BASE, plain, summary, train, train_ranks
from pictures import photo

from isobatch import tasks
from isobatch.config import load, options
from isobatch.config.schema import EvaluateOptions
from isobatch.data.held_out import HeldOut
from isobatch.errors import ConfigError
from isobatch.evaluate.views import COUNT, averaged, views_of

LABELS = numpy.array([0] * 50 + [1] * 30 + [2] * 7)


@pytest.mark.parametrize(("given", "sizes"), [({"holdout": 0.2}, (10, 6, 1)), ({"holdout": 20}, (11, 7, 2)),
                                              ({"fold": 1, "folds": 10}, (5, 3, 1))])  # fmt: skip
def test_every_class_is_held_out_in_proportion(given: dict[str, Any], sizes: tuple[int, ...]) -> None:
    train_rows, held = HeldOut(**given).parted(LABELS)
    assert sorted([*train_rows, *held]) == list(range(len(LABELS))) and list(held) == sorted(held)
    assert all(abs(int((LABELS[held] == c).sum()) - n) <= 1 for c, n in enumerate(sizes))
    if "holdout" in given:
        assert len(held) == (20 if given["holdout"] == 20 else 17)
    again, other = HeldOut(**given).parted(LABELS)[1], HeldOut(**given, split_seed=1).parted(LABELS)[1]
    assert list(again) == list(held) != list(other)
    loose = HeldOut(**given, stratified=False).parted(LABELS)[1]
    assert abs(len(loose) - len(held)) <= 1 and list(loose) != list(held)


def test_folds_are_disjoint_and_hold_everything() -> None:
    for stratified in (True, False):
        held = [HeldOut(fold=k, folds=4, stratified=stratified).parted(LABELS)[1] for k in range(4)]
        assert sorted(numpy.concatenate(held)) == list(range(len(LABELS)))
        assert max(map(len, held)) - min(map(len, held)) <= 1


@pytest.mark.parametrize(("given", "key", "words"), [
    ({"holdout": 0}, "holdout", "neither a share"), ({"holdout": 1.5}, "holdout", "neither a share"),
    ({"holdout": float("nan")}, "holdout", "neither a share"), ({"fold": 5}, "fold", "there are 0 to 4"),
    ({"fold": 0, "holdout": 0.1}, "fold", "both say"), ({"folds": 3}, "folds", "says nothing"),
    ({"stratified": False}, "stratified", "says nothing"), ({"split_seed": 3}, "split_seed", "says nothing"),
    ({"folds": 1, "fold": 0}, "folds", "is not between"),
])  # fmt: skip
def test_what_cannot_be_held_out_is_refused(given: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        HeldOut(**given)
    assert refusal.value.key == f"data.{key}"


def test_neither_side_may_be_empty() -> None:
    for given in ({"holdout": 87}, {"holdout": 0.999}, {"holdout": 0.0001}, {"holdout": 5000}):
        with pytest.raises(ConfigError, match="would be trained on"):
            HeldOut(**given).parted(LABELS)


def digits(**given: Any) -> Any:
    return options("data", {"name": "digits", **given}).load(None, 0)


def test_folds_of_the_digits_on_every_plan(tmp_path: Path) -> None:
    usual, folds = digits(), [digits(fold=k) for k in range(5)]
    assert (len(usual.train), len(usual.eval)) == (1438, 359)
    assert [len(f.eval) for f in folds] == [360, 360, 359, 359, 359] and all(len(f.train) + len(f.eval) == 1797 for f in folds)
    first = folds[0].eval
    assert first.targets().bincount().min() >= 34 and first.targets().tolist() == first.tensors[1].tolist()
    words = ("data=digits", "data.fold=2", "batch.effective=24", "batch.shard=6", "reduction=exact", "epochs=null", "steps=3",
             "evaluate.views=flip", *BASE)  # fmt: skip
    one = train(tmp_path / "one", *words)
    assert train(tmp_path / "six", *words, "batch.micro=6").weights == one.weights
    assert train_ranks(2, tmp_path / "two", *words)[0].weights == one.weights
    found = [summary(tmp_path / name)["final"] for name in ("one", "six", "two")]
    assert found[0] == found[1] == found[2] and found[0]["eval/samples"] == 359


@pytest.mark.slow
def test_mirrored_views_of_weights_in_parts(tmp_path: Path) -> None:
    """Every forward is a collective there, and one rank has a batch more."""
    words = ("data=digits", "data.fold=2", "batch.effective=24", "batch.eval=120", "epochs=null", "steps=2", *BASE)
    one = train(tmp_path / "one", *words, "evaluate.views=flip")
    two = train_ranks(2, tmp_path / "two", *words, "evaluate.views=flip", strategy="fsdp")
    assert two[0].weights[-1] == pytest.approx(one.weights[-1], abs=1e-5)
    found = [summary(tmp_path / name)["final"] for name in ("one", "two")]
    assert found[0]["eval/loss"] == pytest.approx(found[1]["eval/loss"], abs=1e-4) and found[1]["eval/samples"] == 359


def test_a_torchvision_set_has_its_own_test(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    import torchvision

    def loaded(root: str, train: bool, download: bool) -> Any:
        n = 50 if train else 10
        return SimpleNamespace(
            data=numpy.zeros((n, 4, 4, 3), dtype="uint8"), targets=[i % 10 for i in range(n)], classes=range(10)
        )

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", loaded)
    given = {"name": "torchvision", "dataset": "CIFAR10", "root": "/", "download": True}
    usual, held = (options("data", {**given, **more}).load(None, 0) for more in ({}, {"holdout": 0.2}))
    assert (len(usual.train), len(usual.eval), usual.test) == (50, 10, None)
    assert (len(held.train), len(held.eval), len(held.test)) == (40, 10, 10)
    assert held.eval.targets().bincount().tolist() == [1] * 10


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for split, count in (("all", 10), ("test", 2)):
        for i in range(count):
            for name in ("ant", "bee", "cat"):
                photo(root / split / name / f"{i}.png", (12, 12), seed=i)
    rows = [f"all/{name}/{i}.png,{name}" for name in ("ant", "bee", "cat") for i in range(10)]
    (root / "all.csv").write_text("\n".join(["path,label", *rows]))
    (root / "test.csv").write_text("path,label\ntest/ant/0.png,ant\ntest/cat/1.png,cat\n")
    (root / "map.txt").write_text("cat\nbee,insect\nant,insect\n")
    (root / "two.txt").write_text("bee\nant\n")
    return root


FOLDER = {"name": "image_folder", "train_dir": "all", "image_size": 8}
CSV = {"name": "csv", "train_csv": "all.csv", "image_size": 8}


@pytest.mark.parametrize("given", [FOLDER, CSV])
def test_one_folder_or_list_is_enough(photos: Path, given: dict[str, Any]) -> None:
    data = options("data", {**given, "root": str(photos), "holdout": 0.2})
    splits = data.load(options("augment", {"name": "simple"}).sample_transform(data), 0)
    assert (len(splits.train), len(splits.eval), splits.test) == (24, 6, None)
    assert splits.eval.targets().bincount().tolist() == [2, 2, 2]
    seen = {splits.train.describe(i).split("(")[1] for i in range(24)} | {
        splits.eval.describe(i).split("(")[1] for i in range(6)
    }
    assert len(seen) == 30
    for i in range(6):
        image, label = splits.eval.dataset[i]
        assert label == splits.eval.targets()[i] and image.shape == (3, 8, 8)
        assert f"/{splits.info.class_names[label]}/" in splits.eval.describe(i)
    assert splits.eval.dataset.dataset.transform is None, "an evaluation is augmented"


@pytest.mark.parametrize("given", [FOLDER, CSV])
def test_a_class_map_orders_joins_and_leaves_out(photos: Path, given: dict[str, Any]) -> None:
    own = {**given, "root": str(photos), "holdout": 0.2}
    joined = options("data", {**own, "class_map": str(photos / "map.txt")}).load(None, 0)
    assert joined.info.class_names == ("cat", "insect") and joined.train.targets().bincount().tolist() == [8, 16]
    two = options("data", {**own, "class_map": str(photos / "two.txt")}).load(None, 0)
    assert two.info.class_names == ("bee", "ant") and len(two.train) + len(two.eval) == 20
    assert "/bee/" in two.train.describe(two.train.targets().tolist().index(0))


@pytest.mark.parametrize(("text", "words"), [
    ("", "makes 0 class"), ("ant\n", "makes 1 class"), ("ant\nant,x\n", "names ant twice"), ("ant,b,c\nbee\n", "has the line"),
    ("dog\nant\n", "has no folder dog"),
])  # fmt: skip
def test_a_map_that_says_nothing_sound_is_refused(photos: Path, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "map.txt"
    file.write_text(text)
    data = options("data", {**FOLDER, "root": str(photos), "holdout": 0.2, "class_map": str(file)})
    with pytest.raises(ConfigError, match=words):
        data.check()


def test_a_third_split_is_evaluated_on_request_alone(photos: Path, tmp_path: Path) -> None:
    words = ("data=image_folder", f"data.root={photos}", "data.train_dir=all", "data.holdout=0.2", "data.image_size=8",
             "data.num_workers=0", "batch.effective=12", "steps=1", "epochs=null", *BASE)  # fmt: skip
    train(tmp_path / "run", *words)
    assert summary(tmp_path / "run")["final"]["eval/samples"] == 6
    again = ("task=evaluate", f"resume={tmp_path / 'run'}", "logger=none")
    train(tmp_path / "test", *again, "data.test_dir=test", "evaluate.split=test")
    assert summary(tmp_path / "test")["final"]["eval/samples"] == 6
    assert {line.split("/")[-3] for line in (tmp_path / "test" / "predictions.csv").read_text().splitlines()[1:]} == {"test"}
    with pytest.raises(AssertionError, match=r"evaluate\.split=test: data=image_folder has no third split"):
        train_refused(tmp_path / "none", *again, "evaluate.split=test")
    with pytest.raises(ConfigError, match=r"evaluate\.split=test: task=train does not look at a third split"):
        tasks.of(load(plain("evaluate.split=test")))


def train_refused(folder: Path, *words: str) -> None:
    try:
        train(folder, *words)
    except ConfigError as refusal:
        raise AssertionError(str(refusal)) from None


def test_mirrored_views_are_averaged() -> None:
    inputs = torch.arange(8.0).view(1, 1, 2, 4)
    assert averaged(lambda x: x[..., 0].flatten(1), inputs, "flip", (1, 2, 4)).tolist() == [[1.5, 5.5]]
    with pytest.raises(ConfigError, match=r"evaluate\.views=flip: is of images"):
        averaged(lambda x: x, torch.zeros(2, 3), "flip", (3,))
    with pytest.raises(ConfigError, match=r"evaluate\.views=ten: averages class scores"):
        averaged(lambda x: x, torch.zeros(2, 3, 6, 6), "ten", (3, 4, 4))
    with pytest.raises(ConfigError, match=r"evaluate\.views=five: takes parts of 4 x 4 pixels, .* have 4 x 4"):
        averaged(lambda x: x, torch.zeros(2, 3, 4, 4), "five", (3, 4, 4))


def test_corners_and_center_are_torchvisions() -> None:
    from torchvision.transforms.v2 import functional

    images = torch.randn(2, 3, 8, 10)
    assert [name for name in COUNT if EvaluateOptions(views=name)] == ["one", "flip", "five", "ten"]
    for name, parts in (("five", functional.five_crop), ("ten", functional.ten_crop)):
        ours = list(views_of(images, name, (3, 4, 6)))
        expected = parts(images, [4, 6])
        assert len(ours) == COUNT[name] == len(expected)
        key = lambda image: image.flatten().tolist()  # noqa: E731
        assert sorted(map(key, ours)) == sorted(map(key, expected))


def test_views_count_in_a_run_and_in_its_predictions(photos: Path, tmp_path: Path) -> None:
    words = ("data=image_folder", f"data.root={photos}", "data.train_dir=all", "data.holdout=0.2", "data.image_size=16",
             "data.eval_size=24", "data.crop_pct=1", "data.num_workers=0", "batch.effective=12", "steps=1", "epochs=null",
             "evaluate.views=ten", "logger=none", "threads=1", "model=timm", "model.arch=test_resnet")  # fmt: skip
    train(tmp_path / "run", *words)
    train(tmp_path / "one", *words, "task=evaluate", f"resume={tmp_path / 'run'}")
    train(tmp_path / "again", "task=predict", "logger=none", f"resume={tmp_path / 'run'}", "batch.eval=2", "threads=1")
    said = [(tmp_path / name / "predictions.csv").read_text().splitlines()[1:] for name in ("one", "again")]
    rows = [[line.split(",") for line in lines] for lines in said]
    assert [(row[3], row[4]) for row in rows[0]] == [(row[2], row[3]) for row in rows[1]]
    with pytest.raises(ConfigError, match=r"^evaluate\.views=ten: takes parts of 16 x 16 pixels"):
        train(tmp_path / "small", *words, "data.eval_size=16")
