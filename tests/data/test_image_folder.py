"""Folders of images that are not what they seem: skipped files, empty classes, links that lead back, one class alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from harness import train
from PIL import Image

from isobatch.config import options
from isobatch.data.image_folder import FoundImages, below, listed, walked
from isobatch.errors import ConfigError

WORDS = ("logger=none", "threads=1", "model=mlp", "model.width=4", "data=image_folder", "data.image_size=8",
         "data.num_workers=0", "batch.effective=2", "epochs=null", "steps=1")  # fmt: skip


def tree(root: Path, *files: str) -> Path:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    return root


def pets(root: Path) -> Path:
    return tree(root, *(f"{split}/{name}/{i}.png" for split in ("train", "val") for name in ("ape", "bee") for i in range(2)))


def load(root: Path, **more: Any) -> Any:
    return options("data", {"name": "image_folder", "root": str(root), "image_size": 8, **more}).load(None, 0)


def test_what_is_skipped_and_what_is_empty_is_named_in_the_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "isobatch")
    root = tree(pets(tmp_path / "data"), "train/cat/0.gif", "train/cat/1.gif", "train/cat/2.tiff", "val/cat/0.png")
    (root / "train/bee/notes.txt").write_text("x")
    train(tmp_path / "run", *WORDS, f"data.root={root}")
    assert "image_folder: 4 training and 5 evaluation samples of 3 classes" in caplog.text
    assert "train: 4 file(s) are no .jpg, .jpeg, .png, .webp, .bmp and were skipped (2 .gif, 1 .tiff, 1 .txt)" in caplog.text
    assert "train: 1 of 3 classes have no image (cat)" in caplog.text and caplog.text.count("note: ") >= 2


@pytest.mark.parametrize("how", ["one folder", "one with images"])
def test_one_class_alone_is_refused(tmp_path: Path, how: str) -> None:
    root = tree(tmp_path, "train/ape/0.png", "val/ape/0.png")
    if how == "one with images":
        tree(root, "train/cat/0.gif", "val/cat/0.png")
    with pytest.raises(ConfigError, match=r"^data\.root=.*images of one class alone \(ape\)"):
        load(root)


def test_one_class_alone_is_refused_in_a_csv_too(tmp_path: Path) -> None:
    root = tree(tmp_path, "a.png")
    for name in ("train", "val"):
        (root / f"{name}.csv").write_text("path,label\na.png,ape\n")
    with pytest.raises(ConfigError, match=r"^data\.root=.*has the one class ape alone"):
        options("data", {"name": "csv", "root": str(root), "image_size": 8}).load(None, 0)


def test_a_link_that_leads_back_is_not_followed_and_named(tmp_path: Path) -> None:
    root = pets(tmp_path)
    (root / "train/ape/loop").symlink_to("..")
    (root / "train/ape/self").symlink_to(".")
    (root / "train/ape/other").symlink_to("../bee")
    splits = load(root)
    assert splits.train.targets().tolist() == [0, 0, 1, 1]
    assert sum("is not followed" in note for note in splits.info.notes) == 3
    assert any("train/ape/other leads to a folder that is read already" in note for note in splits.info.notes)


def test_a_link_elsewhere_is_followed_once(tmp_path: Path) -> None:
    root, store = pets(tmp_path / "data"), tree(tmp_path / "store", "x/9.png")
    (root / "train/ape/more").symlink_to(store / "x")
    (root / "train/ape/again").symlink_to(store / "x")
    (root / "train/bee/linked.png").symlink_to(store / "x/9.png")
    splits = load(root)
    assert splits.train.targets().tolist() == [0, 0, 0, 1, 1, 1]
    assert sum("is not followed" in note for note in splits.info.notes) == 1


def test_two_classes_that_are_one_folder_are_refused(tmp_path: Path) -> None:
    root = pets(tmp_path)
    for split in ("train", "val"):
        os.symlink("ape", root / split / "gorilla")
    with pytest.raises(ConfigError, match=r"the classes ape and gorilla of .*train are one and the same folder"):
        load(root)


def test_a_class_inside_a_class_is_named_and_hidden_folders_are_not_read(tmp_path: Path) -> None:
    root = tree(pets(tmp_path), "train/ape/bee/7.png", "train/ape/.thumbs/8.png", "train/bee/deep/er/9.png")
    splits = load(root)
    assert splits.train.targets().tolist() == [0, 0, 0, 1, 1, 1]
    (note,) = splits.info.notes
    assert "train/ape holds a folder bee, which is a class too: its images count as ape" in note


@pytest.mark.parametrize("place", [".", "./", "../photos", "absolute"])
def test_folders_below_the_one_that_is_worked_in_keep_their_names(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tree(tmp_path / "photos", "a.png", "b/c.png", "b/d/e.png")
    monkeypatch.chdir(folder)
    given = folder if place == "absolute" else Path(place)
    assert sorted(below(given, walked(given, set(), FoundImages()))) == ["a.png", "b/c.png", "b/d/e.png"]


@pytest.mark.parametrize("root", [".", "data", "./data/", "sub/../data", "/"])
@pytest.mark.parametrize("inner", [".", "train", "../data/train", "absolute"])
def test_names_are_those_that_relpath_gives(root: str, inner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = "data" if root == "/" else root
    inner = str(tmp_path / place / "train") if inner == "absolute" else inner
    if root == "/":
        inner = str(tmp_path / place / inner)
    folder = Path(root) / inner
    (tmp_path / "sub").mkdir()
    for name in ("cat/2.png", "cat/b/1.png", "cat/a.png", "dog/c/d/0.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    found = listed(Path(root), folder, {"cat": 0, "dog": 1})
    files = [sorted(os.path.relpath(file, root) for file in (folder / name).rglob("*.png")) for name in ("cat", "dog")]
    assert found.names == [*files[0], *files[1]] and found.labels == [0, 0, 0, 1]
    assert below(Path("/"), ["/a", "/b/c"]) == ["a", "b/c"] and below(Path("."), ["./a"]) == ["a"]
