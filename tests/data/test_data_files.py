"""Image files: what is refused before torch, what is read, and that reduced decoding shows the same picture."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from pictures import photo
from PIL import Image

from isobatch.config import options
from isobatch.data.files import Names
from isobatch.errors import ConfigError
from isobatch.pixels import Decoding, center_box, read_image, scaled


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split, count in (("train", 3), ("val", 2)):
        for label, name in enumerate(("cat", "dog")):
            for i in range(count):
                photo(tmp_path / "photos" / split / name / f"{i}.jpg", seed=10 * label + i, quality=95)
    return tmp_path / "photos"


def folder(root: Path, /, **more: Any) -> Any:
    return options("data", {"name": "image_folder", "image_size": 16, "root": str(root)} | more)


def test_a_folder_is_read_in_a_fixed_order_with_labels_by_name(photos: Path) -> None:
    photo(photos / "train" / "dog" / "deeper" / "x.PNG", seed=9)
    (photos / "train" / "dog" / "notes.txt").write_text("not an image")
    splits = folder(photos).load(None, 0)
    assert splits.info.class_names == ("cat", "dog") and splits.info.shape == (3, 16, 16)
    assert (len(splits.train), len(splits.eval)) == (7, 4)
    assert splits.train.targets().tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert splits.train.describe(6).endswith("/train/dog/deeper/x.PNG)")
    image, label = splits.train.dataset[6]
    assert (image.shape, image.dtype, label) == ((3, 16, 16), torch.uint8, 1)
    assert splits.info.mean == pytest.approx((0.485, 0.456, 0.406))
    grey = folder(photos, in_chans=1).load(None, 0)
    assert grey.train.dataset[0][0].shape == (1, 16, 16) and len(grey.info.mean) == 1


def spoil(root: Path, how: str) -> dict[str, Any]:
    if how == "missing":
        return {"root": str(root / "nowhere")}
    if how == "file":
        return {"root": str(root / "train" / "cat" / "0.jpg")}
    if how == "unset":
        return {"root": None}
    if how == "no val":
        (root / "val").rename(root / "validation")
    if how == "classes":
        (root / "val" / "dog").rename(root / "val" / "wolf")
    if how == "empty":
        for file in root.glob("val/*/*"):
            file.unlink()
    if how == "flat":
        for file in root.glob("train/*/*"):
            file.unlink()
        for name in ("cat", "dog"):
            (root / "train" / name).rmdir()
    return {}


@pytest.mark.parametrize(
    ("how", "says"),
    [("missing", "no such folder"), ("file", "is a file"), ("unset", "is not set"), ("no val", "has train, validation"),
     ("classes", r"only .*train has 1 \(dog\); only .*val has 1 \(wolf\)"), ("empty", "holds no image"),
     ("flat", "no class folders")],
)  # fmt: skip
def test_a_folder_that_cannot_be_trained_on_is_refused_in_one_line(photos: Path, how: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refusal:
        folder(photos, **spoil(photos, how)).check()
    assert refusal.value.key == "data.root" and "; " in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_missing_folder_is_refused_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom isobatch.config import options\nfrom isobatch.errors import ConfigError\n"
        "try:\n    options('data', {'name': 'image_folder', 'root': 'nowhere'}).check()\n"
        "except ConfigError as error:\n    print(error)\nassert not {'torch', 'numpy', 'PIL'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.startswith("data.root=nowhere: no such folder; ")


@pytest.mark.parametrize(
    ("values", "key"),
    [({"image_size": 0}, "image_size"), ({"crop_pct": 1.5}, "crop_pct"), ({"interpolation": "nearest"}, "interpolation"),
     ({"decode": "half"}, "decode"), ({"in_chans": 4}, "in_chans"), ({"mean": [0.5]}, "mean"), ({"std": [0, 1, 1]}, "std"),
     ({"on_error": "ignore"}, "on_error"), ({"num_workers": -1}, "num_workers"), ({"prefetch": 0}, "prefetch"),
     ({"num_workers": 100_000}, "num_workers"), ({"image_size": 100_000}, "image_size"),
     ({"prefetch": 2**31 - 1}, "prefetch"),
     ({"mean": [float("nan"), 0, 0]}, "mean"),
     ({"std": [1, float("nan"), 1]}, "std"), ({"std": [1e-45, 1, 1]}, "std"), ({"std": [float("inf"), 1, 1]}, "std"),
     ({"eval_size": 2**31 - 1}, "eval_size")],
)  # fmt: skip
def test_options_out_of_range_are_refused(tmp_path: Path, values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        folder(tmp_path, **values)
    assert refusal.value.key == f"data.{key}"


@pytest.mark.parametrize(("size", "wanted"), [((512, 384), 64), ((511, 387), 40), ((300, 1001), 100)])
def test_reduced_decoding_shows_the_same_crop(tmp_path: Path, size: tuple[int, int], wanted: int) -> None:
    path = photo(tmp_path / "big.jpg", size, quality=95)

    def box(width: int, height: int) -> tuple[int, int, int, int]:
        assert (width, height) == size, "the crop is chosen in the full image"
        return width // 5, height // 7, min(size) * 2 // 3, min(size) * 3 // 4

    full = read_image(str(path), box, wanted, "bilinear", Decoding(reduced=False)).float()
    fast = read_image(str(path), box, wanted, "bilinear").float()
    assert full.shape == fast.shape == (3, wanted, wanted)
    assert not full.equal(fast), "it was not decoded at a reduced scale"
    moved = torch.roll(full, (1, 1), (1, 2))[:, 1:, 1:]  # by one pixel each way; rounding may cost half of one
    assert (full - fast).abs().mean() < 0.75 * (full[:, 1:, 1:] - moved).abs().mean()


def test_pixels_are_those_of_pil(tmp_path: Path) -> None:
    path = photo(tmp_path / "a.png", (50, 40))
    for name, method in (("bilinear", Image.Resampling.BILINEAR), ("bicubic", Image.Resampling.BICUBIC)):
        ours = read_image(str(path), center_box(0.9), 24, name)
        theirs = Image.open(path).crop((7, 2, 43, 38)).resize((24, 24), method)
        difference = ours.permute(1, 2, 0).numpy().astype(int) - numpy.asarray(theirs).astype(int)
        assert abs(difference).max() <= 2 and abs(difference).mean() < 0.2
        wide = read_image(str(path), lambda width, height: (3, 5, 44, 27), 24, name).permute(1, 2, 0).numpy().astype(int)
        assert abs(wide - numpy.asarray(Image.open(path).crop((3, 5, 47, 32)).resize((24, 24), method)).astype(int)).max() <= 2
    palette = tmp_path / "p.png"
    Image.open(path).convert("P").save(palette)
    assert read_image(str(palette), center_box(1), 8, "bilinear").shape == (3, 8, 8)


def test_a_scaled_box_stays_inside_and_is_never_empty() -> None:
    assert scaled((10, 20, 40, 60), (100, 100), (100, 100)) == (10, 20, 40, 60)
    assert scaled((10, 20, 40, 60), (100, 100), (50, 25)) == (5, 5, 20, 15)
    for start in (0, 55, 99):
        left, top, width, height = scaled((start, start, 1, 1), (100, 100), (13, 13))
        assert width == height == 1 and left + width <= 13 and top + height <= 13


def test_names_come_back_as_they_were() -> None:
    names = ["a/ü.jpg", "", "b b.png", "\udcff.jpg"]
    packed = Names.of(names)
    assert [packed[i] for i in range(len(packed))] == names
    many = [f"{i:05d}/" + "x" * 64 for i in range(1000)]  # more bytes than a small integer counts
    packed = Names.of(many)
    assert (packed[0], packed[999]) == (many[0], many[999]) and packed.ends.dtype == "int64"


def test_csv_files_list_paths_and_labels(photos: Path) -> None:
    (photos / "train.csv").write_text("path,label\ntrain/cat/0.jpg,10\ntrain/dog/0.jpg,9\n")
    (photos / "val.csv").write_text("path,label\nval/dog/0.jpg,9\n")
    given = {"name": "csv", "root": str(photos), "image_size": 16}
    splits = options("data", given).load(None, 0)
    assert splits.info.class_names == ("9", "10"), "numbers sort as numbers"
    assert splits.train.targets().tolist() == [1, 0] and splits.eval.targets().tolist() == [0]
    for change, says in (
        ({"train_csv": "t.csv"}, "no such file"), ({"label_column": "class"}, "has the columns path, label"),
        ({"root": str(photos / "train")}, "no such file"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            options("data", {**given, **change}).check()
    (photos / "val.csv").write_text("path,label\nval/dog/0.jpg,8\n")
    with pytest.raises(ConfigError, match=r"has labels that train\.csv lacks: 8"):
        options("data", given).check()
    (photos / "val.csv").write_text("path,label\nval/dog/77.jpg,9\n")
    with pytest.raises(ConfigError, match=r"lists val/dog/77\.jpg, which is not there"):
        options("data", given).check()


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"path,label\ntrain/cat/0.jpg,a\ntrain/dog/0.jpg\n", "line 3 has no path or no label"),
     (b"path,label\ntrain/cat/0.jpg,\n", "line 2 has no path or no label"), (b"path,label\n,a\n", "line 2 has no path"),
     (b"path,label\ntrain/cat/0.jpg,\xe9\n", "cannot be read as text"), (b"\xff\xd8\xff\x00", "cannot be read as text"),
     (b'path,label\ntrain/cat/0.jpg,"a\n', "cannot be read as text"),
     (b"path,label\ntrain/cat/0.jpg," + 200_000 * b"a", "cannot be read as text"), (b"", "is empty"),
     (b"path,label\n" + 5_000 * b"a" + b".jpg,b\n", "which is not there"),
     (b"path,label,label\ntrain/cat/0.jpg,a,b\n", "has the columns path, label, label")],
)  # fmt: skip
def test_a_csv_file_that_cannot_be_used_is_refused_in_one_line(photos: Path, content: bytes, says: str) -> None:
    (photos / "train.csv").write_bytes(content)
    (photos / "val.csv").write_bytes(content)
    with pytest.raises(ConfigError, match=says) as refusal:
        options("data", {"name": "csv", "root": str(photos), "image_size": 16}).check()
    assert refusal.value.key.startswith("data.") and "\n" not in str(refusal.value) and len(str(refusal.value)) < 800


def test_spaces_around_names_and_cells_are_none_of_theirs(photos: Path) -> None:
    (photos / "train.csv").write_text("path, label\ntrain/cat/0.jpg, cat\ntrain/dog/0.jpg,dog \n")
    (photos / "val.csv").write_text("path,label\nval/dog/0.jpg,dog\n")
    splits = options("data", {"name": "csv", "root": str(photos), "image_size": 16}).load(None, 0)
    assert splits.info.class_names == ("cat", "dog") and splits.eval.targets().tolist() == [1]


def test_labels_that_only_look_like_numbers_are_text(photos: Path) -> None:
    text = f"path,label\ntrain/cat/0.jpg,\u00b2\ntrain/dog/0.jpg,10\ntrain/dog/1.jpg,{5_000 * '1'}\n"
    for name in ("train.csv", "val.csv"):
        (photos / name).write_text(text, encoding="utf-8")
    splits = options("data", {"name": "csv", "root": str(photos), "image_size": 16}).load(None, 0)
    assert splits.info.class_names == ("10", 5_000 * "1", "\u00b2")


def test_a_torchvision_set_is_read_or_its_absence_refused(tmp_path: Path) -> None:
    given = {"name": "torchvision", "dataset": "CIFAR10", "root": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"has no folder cifar-10-batches-py; set data.download=true"):
        options("data", given).check()
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(ConfigError, match="torchvision could not load CIFAR10"):
        options("data", given).load(None, 0)
    with pytest.raises(ConfigError, match="CIFAR10, CIFAR100"):
        options("data", {**given, "dataset": "CIFAR"})


def test_a_hugging_face_set_without_package_or_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"not installed; pip install 'isobatch\[hugging_face\]'"):
            options("data", {"name": "hugging_face", "path": "mnist"}).check()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "state.json").touch()
    for path, says in ((None, "is not set"), ("./nowhere", "no such folder"), (str(tmp_path / "x"), "no such folder"),
                       (str(tmp_path / "single"), "one split that was saved alone")):  # fmt: skip
        with pytest.raises(ConfigError, match=says) as refusal:
            options("data", {"name": "hugging_face", "path": path}).check()
        assert refusal.value.key == "data.path"
