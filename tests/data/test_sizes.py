"""Images that are not square, sizes that change with the epoch, epochs of several passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train, train_ranks
from pictures import photo
from PIL import Image

from isobatch.config import options
from isobatch.data import unlabelled
from isobatch.data.samples import Samples
from isobatch.errors import ConfigError
from isobatch.pixels import center_box, decode_crop
from isobatch.resume import weights_know
from isobatch.resume.signature import Signature
from isobatch.sampler import Repeated, Shuffle


def test_a_crop_has_the_aspect_of_what_it_becomes(tmp_path: Path) -> None:
    assert center_box(1.0, (10, 20))(100, 100) == (0, 25, 100, 50)
    assert center_box(0.5, [20, 10])(100, 100) == (37, 25, 25, 50)
    assert center_box(0.875, [64, 64])(100, 80) == center_box(0.875)(100, 80)
    photo(tmp_path / "x.jpg", (200, 100), seed=0)
    data = (tmp_path / "x.jpg").read_bytes()
    whole = decode_crop(data, center_box(1.0, (20, 40)), (20, 40), "bilinear")
    assert whole.shape == (3, 20, 40)
    upright = decode_crop(data, center_box(1.0, (40, 20)), (40, 20), "bilinear")
    assert upright.shape == (3, 40, 20) and upright.float().mean() != whole.float().mean()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for i in range(12):
        photo(root / "ab"[i % 2] / f"{i}.jpg", (48, 36), seed=i)
    return root


def folder(root: Path, **given: Any) -> Any:
    return options("data", {"name": "image_folder", "root": str(root), "train_dir": ".", "fold": 0, "folds": 3, **given})


def test_sizes_are_a_function_of_the_epoch(photos: Path) -> None:
    data = folder(photos, image_size=[12, 16], sizes=[[0, 8], [2, [10, 14]]])
    splits = data.load(options("augment", {"name": "simple", "blur": 1.0}).sample_transform(data), 0)
    assert splits.info.shape == (3, 12, 16) and splits.train.dataset.largest_epoch == 2
    train_samples, evaluated = Samples(splits.train, 0), Samples(splits.eval, 0)
    for epoch, shape in ((2, (3, 10, 14)), (0, (3, 8, 8)), (1, (3, 8, 8)), (7, (3, 10, 14))):
        assert train_samples.isolated((epoch, [0, 1])).inputs.shape == (2, *shape)
        assert evaluated.isolated((0, [0, 1])).inputs.shape == (2, 3, 12, 16)


@pytest.mark.parametrize(("given", "key"), [
    ({"image_size": [1, 2, 3]}, "image_size"), ({"image_size": 0}, "image_size"), ({"image_size": "big"}, "image_size"),
    ({"image_size": True}, "image_size"), ({"eval_size": [12, 0]}, "eval_size"), ({"eval_size": "12x16"}, "eval_size"),
    ({"sizes": [[1, 8]]}, "sizes"),
    ({"sizes": []}, "sizes"), ({"sizes": 8}, "sizes"), ({"sizes": [[0, 8], [0, 9]]}, "sizes"), ({"sizes": [[0, 0]]}, "sizes"),
])  # fmt: skip
def test_what_is_no_size_is_refused(photos: Path, given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        folder(photos, **given)
    assert refusal.value.key == f"data.{key}"


def test_evaluations_may_have_a_size_and_an_aspect_of_their_own(photos: Path, tmp_path: Path) -> None:
    splits = folder(photos, image_size=16, eval_size=[8, 24], crop_pct=1.0).load(None, 0)
    assert splits.train.dataset[0][0].shape == (3, 16, 16) and splits.eval.dataset[0][0].shape == (3, 8, 24)
    left, top, width, height = splits.eval.dataset.dataset.box(48, 48)
    assert (width, height, top) == (48, 16, 16), "the crop has another aspect than what it becomes"
    known = Signature.read(json.loads(json.dumps(Signature.of(splits.info).facts())))
    assert known is not None and known.eval_size == (8, 24) == splits.info.eval_size
    settled = folder(photos).settled(weights_know.Known(known, "a run").settings())
    assert (settled.image_size, settled.eval_size) == (16, [8, 24])
    (tmp_path / "new").mkdir()
    Image.new("RGB", (48, 48)).save(tmp_path / "new" / "a.png")
    files = unlabelled.load(str(tmp_path / "new"), settled, splits.info, "path")
    assert files.dataset[0][0].shape == (3, 8, 24) and files.dataset.box(48, 48) == (left, top, width, height)


@pytest.mark.timeout(240)
def test_growing_images_train_the_same_on_every_plan(photos: Path, tmp_path: Path) -> None:
    words = ("data=image_folder", f"data.root={photos}", "data.train_dir=.", "data.fold=0", "data.image_size=[32,40]",
             "data.sizes=[[0,24],[1,[28,32]],[2,[32,40]]]", "data.num_workers=0", "augment=simple", "sampler.passes=2",
             "batch.effective=8", "batch.shard=4", "reduction=exact", "epochs=3", "logger=none", "threads=1", "model=small",
             "optimizer.lr=0.001")  # fmt: skip
    shapes: list[tuple[int, ...]] = []
    one = train(
        tmp_path / "one", *words, observe=lambda s, p, data: shapes.extend(m.inputs.shape[2:] for m in data.micro_batches)
    )
    assert list(dict.fromkeys(map(tuple, shapes))) == [(24, 24), (28, 32), (32, 40)] and len(one.ids) == 9
    assert train_ranks(2, tmp_path / "two", *words)[0].weights == one.weights


def test_an_epoch_of_several_passes() -> None:
    none = lambda: torch.zeros(0)  # noqa: E731
    order = Shuffle(passes=3).order(1, 10, 5, none)
    assert Shuffle(passes=3).order_size(10) == 30 == len(order)
    for k in range(3):
        part = order[10 * k : 10 * k + 10]
        assert (part - 10 * k).tolist() == Shuffle().order(3 + k, 10, 5, none).tolist()
    assert order.unique().numel() == 30, "two passes share their draws"
    repeated = Repeated(passes=2, repeats=3).order(0, 12, 0, none)
    assert repeated.unique().numel() == 24 and (repeated % 12)[:12].unique().numel() == 4
    with pytest.raises(ConfigError, match=r"sampler\.passes"):
        Shuffle(passes=0)
