"""Images in tars: found by place whatever the order of reading, kept indices that stay true, and refusals in one line."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import plain, summary, train
from PIL import Image

from isobatch.config import options
from isobatch.data import tar_index, webdataset
from isobatch.data.device import ToDevice
from isobatch.data.feed import Request
from isobatch.data.loader import WorkerSource
from isobatch.data.samples import Samples
from isobatch.errors import ConfigError, JobFailed

Member = tuple[str, bytes]


def jpeg(shade: int, side: int = 20) -> bytes:
    found = io.BytesIO()
    Image.new("RGB", (side, side), (shade, shade, shade)).save(found, "JPEG")
    return found.getvalue()


def write(path: Path, *members: Member) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def samples(*numbers: int, classes: int = 2) -> list[Member]:
    return [m for i in numbers for m in ((f"n/{i:03d}.jpg", jpeg(10 * i)), (f"n/{i:03d}.cls", str(i % classes).encode()))]


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Three training tars with 4, 1 and 7 samples of shades 0, 10, ... and one to evaluate on."""
    for k, numbers in enumerate(([0, 1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11])):
        write(tmp_path / "tars" / f"train-{k:03d}.tar", *samples(*numbers))
    write(tmp_path / "tars" / "val-000.tar", *samples(1, 2, 3))
    return tmp_path / "tars"


def data(root: Path, **more: Any) -> Any:
    return options("data", {"name": "webdataset", "root": str(root), "image_size": 16, **more})


def shades(split: Any) -> list[int]:
    return [round(float(split.dataset[i][0].float().mean()) / 10) for i in range(len(split))]


def test_every_sample_is_found_by_its_place(tars: Path) -> None:
    splits = data(tars, train_tars="train-{000..002}.tar").load(None, 0)
    assert (len(splits.train), len(splits.eval), splits.info.class_names) == (12, 3, ("0", "1"))
    assert shades(splits.train) == list(range(12))
    assert splits.train.targets().tolist() == [i % 2 for i in range(12)]
    image, label = splits.train.dataset[4]
    assert (image.shape, image.dtype, label) == ((3, 16, 16), torch.uint8, 0)
    assert splits.train.describe(5) == f"sample 5 (n/005.jpg in {tars}/train-002.tar)"


def test_samples_are_held_out_of_the_training_tars(tars: Path) -> None:
    splits = data(tars, holdout=0.25, eval_tars="none-*.tar", test_tars="val-*.tar").load(None, 0)
    assert (len(splits.train), len(splits.eval), len(splits.test)) == (9, 3, 3)
    assert sorted(shades(splits.train) + shades(splits.eval)) == list(range(12)) and shades(splits.test) == [1, 2, 3]
    assert splits.eval.targets().tolist() == [shade % 2 for shade in shades(splits.eval)]
    assert splits.train.dataset.dataset is not splits.eval.dataset.dataset, "one would close the other's files"


def test_a_class_map_orders_joins_and_leaves_out(tmp_path: Path) -> None:
    words = ["cat", "bee", "ant", "dog"]
    members = [m for i in range(12) for m in ((f"{i:02d}.jpg", jpeg(10 * i)), (f"{i:02d}.txt", words[i % 4].encode()))]
    write(tmp_path / "train-0.tar", *members)
    write(tmp_path / "val-0.tar", *members[:8])
    (tmp_path / "map.txt").write_text("cat\nbee,insect\nant,insect\n")
    splits = data(tmp_path, class_map=str(tmp_path / "map.txt")).load(None, 0)
    assert splits.info.class_names == ("cat", "insect") and splits.info.num_classes == 2
    assert shades(splits.train) == [0, 1, 2, 4, 5, 6, 8, 9, 10] and splits.train.targets().tolist() == [0, 1, 1] * 3
    assert shades(splits.eval) == [0, 1, 2] and [splits.eval.dataset[i][1] for i in range(3)] == [0, 1, 1]
    held = data(tmp_path, class_map=str(tmp_path / "map.txt"), fold=0, folds=3).load(None, 0)
    assert sorted(shades(held.train) + shades(held.eval)) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert sorted(held.eval.targets().tolist()) == [0, 1, 1]
    (tmp_path / "other.txt").write_text("eel\nfly\n")
    with pytest.raises(ConfigError, match=r"^data\.class_map=.*other\.txt: names no label of train-\*\.tar"):
        data(tmp_path, class_map=str(tmp_path / "other.txt")).load(None, 0)


def test_no_more_files_are_open_than_allowed(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "OPEN_TARS", 2)
    split = data(tars).load(None, 0).train
    assert [shades(split) for _ in range(2)] == [list(range(12))] * 2
    assert len(split.dataset.files) == 2


def test_members_may_lie_anywhere_and_labels_be_words(tmp_path: Path) -> None:
    """Sorted by kind, other members beside, upper case, two dots, folders: grouped by name all the same."""
    images = [(f"{name}.JPG", jpeg(shade)) for name, shade in (("a/x.7", 30), ("b/x", 60), ("b/x.7", 70))]
    notes = [("README.json", b"{}"), ("._junk.jpg", b"?"), ("b/x.seg.png", b"?"), ("b/x.txt", b" dog\n"), ("b/x.pyd", b"?")]
    write(tmp_path / "train-0.tar", ("a/x.txt", b"cat"), *notes, ("a/x.jpg", jpeg(20)), *images)
    write(tmp_path / "val-0.tar", ("k.json", json.dumps({"label": "cat"}).encode()), ("k.webp", jpeg(90)))
    splits = data(tmp_path).load(None, 0)
    assert splits.info.class_names == ("cat", "dog") and shades(splits.train) == [2, 6]
    assert splits.train.targets().tolist() == [0, 1] and splits.eval.targets().tolist() == [0]
    two = data(tmp_path, image_member="7.jpg", train_tars="train-0.tar", eval_tars="train-0.tar").load(None, 0)
    assert shades(two.train) == [3, 7]


def test_an_index_is_made_once_and_only_kept_while_it_is_true(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[str] = []
    scan = tar_index.scan
    monkeypatch.setattr(tar_index, "scan", lambda tar, *rest: scanned.append(tar.name) or scan(tar, *rest))
    data(tars).check()
    assert len(scanned) == 4
    data(tars).load(None, 0)
    assert len(scanned) == 4, "the ranks find what the check has made"
    write(tars / "train-001.tar", *samples(4, 20))
    assert shades(data(tars).load(None, 0).train) == [*range(5), 20, *range(5, 12)]
    index = tars / "train-000.tar.index.safetensors"
    whole = index.read_bytes()
    for spoiled in (b"", b"nothing", whole[: len(whole) // 2], whole.replace(b"offsets", b"offzets")):
        index.write_bytes(spoiled)
        assert shades(data(tars).load(None, 0).train)[:5] == list(range(5))
    assert scanned[4:] == ["train-001.tar"] + ["train-000.tar"] * 4
    data(tars, label_member="cls").load(None, 0)
    assert len(scanned) == 13, "made with other members"
    assert not list(tars.glob("*.part"))


def test_an_index_goes_to_the_cache_where_the_tars_cannot_be_written(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_index = tar_index._write

    def beside_fails(place: Path, *rest: Any) -> bool:
        return place.parent != tars and write_index(place, *rest)

    monkeypatch.setattr(tar_index, "_write", beside_fails)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tars / "home"))
    data(tars).check()
    assert len(list((tars / "home" / "isobatch").glob("*.index.safetensors"))) == 4
    monkeypatch.setattr(tar_index, "scan", None)  # nothing is made again
    assert shades(data(tars).load(None, 0).train) == list(range(12))
    monkeypatch.undo()
    (tars / "a file").touch()
    with pytest.raises(ConfigError, match="can be written neither"):
        data(tars, cache_dir=str(tars / "a file")).check()
    data(tars, cache_dir=str(tars / "asked")).check()
    assert len(list((tars / "asked").glob("*"))) == 4 and not list(tars.glob("*.safetensors"))


def test_threads_that_read_indices_at_once_do_not_disturb_each_other(tars: Path) -> None:
    many = tars.parent / "many"
    many.mkdir()
    for i in range(64):
        shutil.copy(tars / "train-000.tar", many / f"train-{i:03}.tar")
    shutil.copy(tars / "val-000.tar", many)
    data(many).check()
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    change = [lambda *_: sum(range(20))]  # Python code in a collection, as Hypothesis has it: where threads may change
    gc.callbacks.extend(change)
    gc.set_threshold(5)
    sys.setswitchinterval(1e-6)
    try:
        assert len(data(many).load(None, 0).train) == 64 * 4
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        gc.callbacks.remove(change[0])


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def test_a_tar_that_is_cut_off_is_named_wherever_the_cut_is(tmp_path: Path) -> None:
    write(tmp_path / "val-0.tar", *samples(0, 1))
    path = write(tmp_path / "train-0.tar", *samples(0, 1, 2))
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        ends = [m.offset for m in archive][1:]
    cuts = [1, 300, *ends, *(end + 100 for end in ends), *(end + 512 for end in ends), *(end - 1 for end in ends)]
    for size in cuts:
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"cut off") as refusal:
            data(tmp_path).check()
        assert refusal.value.key == "data.train_tars" and str(path) in str(refusal.value) and "\n" not in str(refusal.value)
    for offset in ends:  # a damaged header in the middle, which tarfile takes for the end
        path.write_bytes(whole[:offset] + b"\xff" * 512 + whole[offset + 512 :])
        with pytest.raises(ConfigError, match=f"damaged at byte {offset}"):
            data(tmp_path).check()
    path.write_bytes(whole)
    data(tmp_path).check()


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([("a.jpg", jpeg(1))], r"no label for a\.jpg \(looked for cls, json, txt\)"),
        ([("a.jpg", jpeg(1)), ("a.pyd", b"x")], r"only a\.pyd, a pickle, which can run code and is not read"),
        ([("a.jpg", jpeg(1)), ("a.json", b'{"class": 3}')], r"a\.json holds no label under 'label' \(data\.label_key\)"),
        ([("a.jpg", jpeg(1)), ("a.json", b'{"label": [3]}')], r"a\.json holds no label"),
        ([("a.jpg", jpeg(1)), ("a.json", b'{"label": true}')], r"a\.json holds no label"),
        ([("a.jpg", jpeg(1)), ("a.cls", b"\xff\xfe")], r"a\.cls holds no label"),
        ([("a.jpg", jpeg(1)), ("a.cls", b"1"), ("b.jpg", jpeg(1)), ("a.cls", b"1")], r"holds a\.cls twice"),
        ([("a.mp3", b"x")], r"holds no image .*it has mp3 members"),
        ([], "it is empty"),
        ([("a.jpg", jpeg(1)), ("a.cls", b"-1")], "1 samples without a label"),
        ([("a.jpg", jpeg(1)), ("a.cls", b"0")], r"labels that train-\*\.tar lacks: 1"),
        ([("a.jpg", jpeg(1)), ("a.txt", b"cat")], "labels that"),
    ],
)  # fmt: skip
def test_samples_that_cannot_be_used_are_refused(tmp_path: Path, members: list[Member], says: str) -> None:
    write(tmp_path / "train-0.tar", *members)
    write(tmp_path / "val-0.tar", *samples(1))
    with pytest.raises(ConfigError, match=says) as refusal:
        data(tmp_path).load(None, 0)
    assert "; " in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"train_tars": "train-{000..005}.tar"}, r"3 of the tars are not below .*the first is train-003\.tar"),
        ({"train_tars": "t-*.tar"}, r"named so \(it has train-000\.tar, train-001\.tar, train-002\.tar \.\.\.\)"),
        ({"train_tars": "{0..9999999}.tar"}, "more than 100000 tars"),
        ({"train_tars": "s3://bucket/train-{0..9}.tar"}, "no path of this machine"),
        ({"train_tars": "train-000.tar.gz"}, r"is compressed.*decompress"),
        ({"image_member": "pyd"}, r"data\.image_member=pyd: is a pickle"),
        ({"root": None}, "is not set"),
    ],
)  # fmt: skip
def test_tars_that_are_not_there_are_refused(tars: Path, more: dict[str, Any], says: str) -> None:
    (tars / "train-000.tar.gz").write_bytes(b"\x1f\x8b" + bytes(600))
    with pytest.raises(ConfigError, match=says):
        data(**{"root": tars} | more).check() if more.get("root", 1) else options("data", {"name": "webdataset"}).check()


def test_braces_count_and_list() -> None:
    assert list(webdataset.expanded("a-{08..11}.tar")) == [f"a-{n}.tar" for n in ("08", "09", "10", "11")]
    assert list(webdataset.expanded("{x,y}{0..1}")) == ["x0", "x1", "y0", "y1"]
    assert list(webdataset.expanded("plain{}.tar")) == ["plain{}.tar"]


def batches(split: Any, workers: int, order: list[int], on_error: bool = False) -> list[torch.Tensor]:
    reader = WorkerSource(Samples(split, 5, on_error), ToDevice(torch.device("cpu"), split.info, False), workers)
    try:
        requests = [Request(1, torch.tensor(order[i : i + 3])) for i in (0, 3, 6, 9)]
        return [x for pair in reader.batches(iter(requests)) for x in pair]
    finally:
        reader.close()


def test_the_same_bits_for_any_number_of_workers(tars: Path) -> None:
    choices = data(tars)
    augment = options("augment", {"name": "simple", "erase": 0.5}).sample_transform(choices)
    order = [7, 0, 11, 4, 2, 9, 1, 3, 10, 5, 8, 6]
    alone, two = (batches(choices.load(augment, 0).train, workers, order) for workers in (0, 2))
    assert all(a.equal(b) for a, b in zip(alone, two, strict=True))
    assert alone[1].tolist() == [1, 0, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_member_that_cannot_be_decoded_is_named(tars: Path, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    broken = [("n/004.jpg", jpeg(40)[:200]), ("n/004.cls", b"0")]
    write(tars / "train-001.tar", *broken)
    split = data(tars).load(None, 0).train
    with pytest.raises(JobFailed, match=r"sample 4 \(n/004\.jpg in .*/train-001\.tar\) could not be read: OSError: Trunc"):
        batches(split, workers, list(range(12)))
    with caplog.at_level(logging.WARNING):
        found = batches(split, workers, list(range(12)), on_error=True)
    assert found[3].tolist() == [1, 1, 1], "the next one stands in"
    assert sum("n/004.jpg in" in line for line in caplog.messages) == 1


def test_a_tar_that_shrinks_while_it_is_read_is_an_unreadable_sample(tars: Path) -> None:
    split = data(tars).load(None, 0).train
    cut(tars / "train-001.tar", 600)
    with pytest.raises(JobFailed, match=r"004\.jpg in .*become shorter than its index"):
        batches(split, 0, list(range(12)))


def test_a_run_and_its_resume_in_mid_epoch_train_the_same(tars: Path, tmp_path: Path) -> None:
    given = ("data=webdataset", f"data.root={tars}", "data.image_size=16", "augment=simple", "model=mlp", "model.width=4",
             "model.depth=1", "logger=none", "threads=1", "batch.effective=5", "epochs=null", "steps=5", "scheduler=constant",
             'data.train_tars="train-{000..002}.tar"', "checkpoint.every=1")  # fmt: skip
    assert plain(*given)["data"]["train_tars"] == "train-{000..002}.tar"
    whole = train(tmp_path / "whole", *given, "data.num_workers=0")
    first = train(tmp_path / "parts", *given, "data.num_workers=2", "steps=2")
    rest = train(tmp_path / "rest", *given, "data.num_workers=0", f"resume={tmp_path / 'parts'}")
    assert first.ids + rest.ids == whole.ids
    assert first.weights + rest.weights == whole.weights
    assert summary(tmp_path / "rest")["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]
