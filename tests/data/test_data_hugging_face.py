"""Data sets of Hugging Face: columns found, rows read by place from folders without a network, refusals in one line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train
from PIL import Image

from isobatch.config import options
from isobatch.data.device import ToDevice
from isobatch.data.feed import Request
from isobatch.data.loader import WorkerSource
from isobatch.data.samples import Samples
from isobatch.errors import ConfigError, JobFailed

datasets: Any = None  # the package: a second to import, which only these tests need


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    global datasets
    datasets = pytest.importorskip("datasets")


def encoded(shade: int) -> bytes:
    found = io.BytesIO()
    Image.new("RGB", (20, 24), (shade,) * 3).save(found, "JPEG")
    return found.getvalue()


def rows(numbers: range, broken: int | None = None, **more: Any) -> Any:
    """Row i: shade 10 i, label i % 3 of four classes."""
    cells = [{"bytes": encoded(10 * i)[: 200 if i == broken else None], "path": f"{i}.jpg"} for i in numbers]
    features = {"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["ant", "bee", "cat", "dog"])}
    columns = {"picture": cells, "kind": [i % 3 for i in numbers]} | more
    kinds = {name: datasets.Value("int64" if isinstance(values[0], int) else "string") for name, values in more.items()}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features | kinds))


def saved(folder: Path, broken: int | None = None, **more: Any) -> Path:
    datasets.disable_progress_bars()
    both = {"train": rows(range(12), broken, **more), "test": rows(range(3, 6), **{k: v[3:6] for k, v in more.items()})}
    datasets.DatasetDict(both).save_to_disk(folder, max_shard_size="2KB")  # several files
    return folder


def data(path: Path | str, **more: Any) -> Any:
    return options("data", {"name": "hugging_face", "path": str(path), "image_size": 16, **more})


def shades(split: Any) -> list[int]:
    return [round(float(split.dataset[i][0].float().mean()) / 10) for i in range(len(split))]


def test_a_saved_data_set_is_read_row_by_row(tmp_path: Path) -> None:
    splits = data(saved(tmp_path / "saved")).load(None, 0)
    assert splits.info.class_names == ("ant", "bee", "cat", "dog"), "also the class without a sample"
    assert shades(splits.train) == list(range(12)) and shades(splits.eval) == [3, 4, 5]
    assert splits.train.targets().tolist() == [i % 3 for i in range(12)]
    assert splits.train.describe(4) == f"sample 4 (4.jpg, row 4 of train of {tmp_path / 'saved'})"
    assert splits.train.dataset.column.num_chunks > 1
    parts = data(tmp_path / "saved", train_split="train[:75%]", eval_split="train[9:]").load(None, 0)
    assert shades(parts.train) == list(range(9)) and shades(parts.eval) == [9, 10, 11]
    few = data(tmp_path / "saved", train_split="train[:2]").load(None, 0)
    assert few.train.targets().tolist() == [0, 1] and few.eval.targets().tolist() == [0, 1, 2], "the classes are known anyway"


def test_samples_are_held_out_of_the_training_split(tmp_path: Path) -> None:
    splits = data(saved(tmp_path / "saved"), fold=1, folds=4, test_split="test").load(None, 0)
    assert (len(splits.train), len(splits.eval), shades(splits.test)) == (9, 3, [3, 4, 5])
    assert sorted(shades(splits.train) + shades(splits.eval)) == list(range(12))
    assert sorted(splits.eval.targets().tolist()) == [0, 1, 2], "a class is not held out in proportion"
    datasets.DatasetDict({"train": rows(range(12))}).save_to_disk(tmp_path / "alone")
    assert len(data(tmp_path / "alone", holdout=2).load(None, 0).eval) == 2


def test_a_class_map_orders_joins_and_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "map.txt").write_text("cat\nant,other\ndog,other\n")
    splits = data(saved(tmp_path / "saved"), class_map=str(tmp_path / "map.txt")).load(None, 0)
    assert splits.info.class_names == ("cat", "other")
    assert shades(splits.train) == [0, 2, 3, 5, 6, 8, 9, 11] and splits.train.targets().tolist() == [1, 0] * 4
    assert shades(splits.eval) == [3, 5] and splits.eval.targets().tolist() == [1, 0]
    words = saved(tmp_path / "words", name=["x", "y", "z"] * 4)
    (tmp_path / "map.txt").write_text("z\nx\n")
    splits = data(words, class_map=str(tmp_path / "map.txt"), label_column="name").load(None, 0)
    assert splits.info.class_names == ("z", "x") and splits.train.targets().tolist() == [1, 0] * 4


def test_a_shuffled_data_set_keeps_its_order(tmp_path: Path) -> None:
    both = datasets.DatasetDict(train=rows(range(12)).shuffle(seed=3), validation=rows(range(3)))
    both.save_to_disk(tmp_path / "saved")
    train_split = data(tmp_path / "saved").load(None, 0).train
    order = [int(cell["path"].removesuffix(".jpg")) for cell in both["train"].with_format("arrow")[:]["picture"].to_pylist()]
    assert order != list(range(12)) and shades(train_split) == order


def test_a_folder_of_images_is_read(tmp_path: Path) -> None:
    for split, name, shade in (("train", "cat", 10), ("train", "dog", 20), ("validation", "dog", 30)):
        path = tmp_path / "photos" / split / name / "a.jpg"
        path.parent.mkdir(parents=True)
        path.write_bytes(encoded(shade))
    (tmp_path / "photos" / "validation" / "cat").mkdir()
    splits = data(tmp_path / "photos", cache_dir=str(tmp_path / "cache")).load(None, 0)
    assert splits.info.class_names == ("cat", "dog") and shades(splits.train) == [1, 2]
    assert splits.train.describe(1).startswith(f"sample 1 ({tmp_path}/photos/train/dog/a.jpg, row 1")


def test_an_evaluation_split_may_number_the_same_classes_otherwise(tmp_path: Path) -> None:
    def one(names: list[str], labels: list[int]) -> Any:
        kinds = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=names))
        cells = [{"bytes": encoded(10 * i), "path": None} for i in range(len(labels))]
        return datasets.Dataset.from_dict({"image": cells, "label": labels}, features=kinds)

    train = one(["ant", "bee", "cat"], [0, 1, 2])
    datasets.DatasetDict(train=train, test=one(["cat", "ant", "bee"], [0, 1, 2])).save_to_disk(tmp_path / "a")
    assert data(tmp_path / "a").load(None, 0).eval.targets().tolist() == [2, 0, 1]
    datasets.DatasetDict(train=train, test=one(["cat", "dog", "bee"], [0, 2, 2])).save_to_disk(tmp_path / "b")
    assert data(tmp_path / "b").load(None, 0).eval.targets().tolist() == [2, 1, 1], "no sample is a dog"
    datasets.DatasetDict(train=train, test=one(["cat", "dog"], [0, 1])).save_to_disk(tmp_path / "c")
    with pytest.raises(ConfigError, match=r"^data\.eval_split=.*has samples of dog, and the train split has .* ant, bee, cat"):
        data(tmp_path / "c").load(None, 0)


def test_labels_may_be_words_and_images_plain_bytes(tmp_path: Path) -> None:
    kinds = datasets.Features(jpg=datasets.Value("binary"), label=datasets.Value("string"))
    one = datasets.Dataset.from_dict({"jpg": [encoded(10), encoded(20)], "label": ["wolf", "fox"]}, features=kinds)
    datasets.DatasetDict(train=one, test=one).save_to_disk(tmp_path / "saved")
    splits = data(tmp_path / "saved", image_column="jpg").load(None, 0)
    assert splits.info.class_names == ("fox", "wolf") and splits.train.targets().tolist() == [1, 0]
    assert shades(splits.train) == [1, 2]


@pytest.mark.parametrize(
    ("more", "key", "says"),
    [
        ({"train_split": "training"}, "data.train_split", "the data set has train, test; set data.train_split to one"),
        ({"eval_split": "val"}, "data.eval_split", "has train, test"),
        ({"eval_split": "test[90:]"}, "data.eval_split", "is empty: test has 3 samples"),
        ({"image_column": "photo"}, "data.image_column", "no such column; there are picture, kind, word, number"),
        ({"image_column": "word"}, "data.image_column", r"holds Value\('string'\), no encoded images; choose one of picture"),
        ({"subset": "x"}, "data.subset", "has no subsets"), ({"revision": "v1"}, "data.revision", "has no revisions"),
        ({"label_column": "picture"}, "data.label_column", "no classes"),
        ({"label_column": "number"}, "data.train_split", "12 samples without a label"),
        ({"label_column": "word"}, "data.eval_split", "lacks"),
    ],
)  # fmt: skip
def test_splits_and_columns_that_cannot_be_used_are_refused(tmp_path: Path, more: dict[str, Any], key: str, says: str) -> None:
    words = [f"w{i if 3 <= i < 6 else 0}" for i in range(12)]
    given = {"train_split": "train[:3]"} if more == {"label_column": "word"} else {}
    with pytest.raises(ConfigError, match=says) as refusal:
        data(saved(tmp_path / "saved", word=words, number=[-1] * 12), **given, **more).load(None, 0)
    assert refusal.value.key == key and "\n" not in str(refusal.value)


def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("no table")
    with pytest.raises(ConfigError, match=r"data\.path=.*could not be loaded \(.*\); set data\.path to a folder"):
        data(tmp_path / "notes", cache_dir=str(tmp_path)).load(None, 0)
    errors = [
        (ConnectionError("Couldn't reach 'a/b' on the Hub"), "data.path", "the hub cannot be reached.*; check the network"),
        (ValueError("Config name is missing. Please pick one among: ['x', 'y']"), "data.subset", "among: .*; set data.subset"),
        (RuntimeError("Dataset scripts are no longer supported, but found b.py"), "data.path", "which is never run"),
        (datasets.exceptions.DatasetNotFoundError("'a/b' doesn't exist\non the Hub"), "data.path", "its name and revision"),
    ]
    for error, key, says in errors:

        def fails(*args: Any, error: Exception = error, **options: Any) -> None:
            assert "trust_remote_code" not in options
            raise error

        monkeypatch.setattr(datasets, "load_dataset", fails)
        with pytest.raises(ConfigError, match=says) as refusal:
            data("a/b").load(None, 0)
        assert refusal.value.key == key and "\n" not in str(refusal.value)


def batches(split: Any, workers: int, replaces: bool = False) -> list[torch.Tensor]:
    reader = WorkerSource(Samples(split, 5, replaces), ToDevice(torch.device("cpu"), split.info, False), workers)
    try:
        requests = [Request(1, torch.tensor(index)) for index in ([7, 0, 11], [4, 2, 9], [1, 3, 5])]
        return [x for pair in reader.batches(iter(requests)) for x in pair]
    finally:
        reader.close()


def test_the_same_bits_for_any_number_of_workers_and_broken_rows_by_name(tmp_path: Path) -> None:
    choices = data(saved(tmp_path / "saved", broken=2))
    augment = options("augment", {"name": "simple", "erase": 0.5}).sample_transform(choices)
    split = choices.load(augment, 0).train
    alone, two = batches(split, 0, replaces=True), batches(split, 2, replaces=True)
    assert all(a.equal(b) for a, b in zip(alone, two, strict=True))
    assert alone[3].tolist() == [1, 0, 0], "row 3 stands in for row 2"
    with pytest.raises(JobFailed, match=r"sample 2 \(2\.jpg, row 2 of train of .*\) could not be read: OSError"):
        batches(split, 0)


def test_a_run_and_its_resume_in_mid_epoch_train_the_same(tmp_path: Path) -> None:
    given = ("data=hugging_face", f"data.path={saved(tmp_path / 'saved')}", "data.image_size=16", "augment=simple", "model=mlp",
             "model.width=4", "model.depth=1", "logger=none", "threads=1", "batch.effective=5", "epochs=null", "steps=5",
             "scheduler=constant", "checkpoint.every=1")  # fmt: skip
    whole = train(tmp_path / "whole", *given, "data.num_workers=0")
    first = train(tmp_path / "parts", *given, "data.num_workers=2", "steps=2")
    rest = train(tmp_path / "rest", *given, "data.num_workers=0", f"resume={tmp_path / 'parts'}")
    assert first.ids + rest.ids == whole.ids
    assert first.weights + rest.weights == whole.weights
