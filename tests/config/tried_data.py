"""The data that test_every_value.py trains on: the same images as a folder, csv files, tars and masks."""

from __future__ import annotations

import csv
import functools
import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

CLASSES = ("cat", "dog")
KINDS = ("photos", "damaged", "large", "turned", "deep")


def noise(width: int, height: int, seed: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))


def encoded(kind: str, number: int) -> tuple[str, bytes]:
    """(suffix, bytes) of image `number`."""
    out = io.BytesIO()
    if kind == "deep":
        shade = 10_000 + 1_000 * number
        Image.new("I;16", (20, 24), shade).save(out, "PNG")
        return ".png", out.getvalue()
    exif = Image.Exif()
    if kind == "turned":
        exif[274] = 3  # upside down
    noise(*((200, 160) if kind == "large" else (20, 24)), seed=number).save(out, "JPEG", exif=exif, quality=90)
    return ".jpg", out.getvalue()[: 40 if kind == "damaged" and number == 3 else None]


def write(root: Path, kind: str, form: str) -> Path:
    """A data set of `kind` as `form` (a choice of group data) in a folder of its own."""
    where = root / form / kind
    for split, numbers in (("train", range(10)), ("val", range(20, 24))):
        images = [(f"{CLASSES[i % 2]}/{i}{suffix}", data, i % 2) for i in numbers for suffix, data in (encoded(kind, i),)]
        FORMS[form](where, split, images)
    return where


Images = list[tuple[str, bytes, int]]


def as_folder(where: Path, split: str, images: Images) -> None:
    for name, data, _ in images:
        path = where / split / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def as_csv(where: Path, split: str, images: Images) -> None:
    as_folder(where, split, images)
    with (where / f"{split}.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["path", "again", "label", "other", "a", "b"])
        out.writerows([f"{split}/{name}", f"{split}/{images[0][0]}", CLASSES[y], "xy"[k % 3 == 0], y, k % 2 ^ y ^ (k == 1)]
                      for k, (name, _, y) in enumerate(images))  # fmt: skip


def as_masks(where: Path, split: str, images: Images) -> None:
    for number, (name, data, _) in enumerate(images):
        for part in ("images", "masks"):
            (where / split / part).mkdir(parents=True, exist_ok=True)
        (where / split / "images" / Path(name).name).write_bytes(data)
        size = (200, 160) if where.name == "large" else (20, 24)
        mask = Image.frombytes("L", size, bytes(random.Random(number).choices((0, 1), k=size[0] * size[1])))
        mask.save(where / split / "masks" / f"{Path(name).stem}.png")


def as_tars(where: Path, split: str, images: Images) -> None:
    where.mkdir(parents=True, exist_ok=True)
    with tarfile.open(where / f"{split}-0.tar", "w") as archive:
        for number, (_, data, label) in enumerate(images):
            other = encoded("photos", 90 + number)[1]
            meta = f'{{"label": {label}, "other": {int(number % 3 == 0)}}}'.encode()
            for member, content in ((f"{number:03d}.jpg", data), (f"{number:03d}.small.jpg", other),
                                    (f"{number:03d}.json", meta)):  # fmt: skip
                entry = tarfile.TarInfo(member)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def as_hub(where: Path, split: str, images: Images) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    classes = datasets.ClassLabel(names=list(CLASSES))
    features = datasets.Features({"image": datasets.Image(), "label": classes, "other": classes})
    columns = {"image": [{"bytes": data, "path": name} for name, data, _ in images], "label": [y for _, _, y in images],
               "other": [int(k % 3 == 0) for k in range(len(images))]}  # fmt: skip
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(where / split)
    (where / "dataset_dict.json").write_text('{"splits": ["train", "val"]}')


FORMS: dict[str, Callable[[Path, str, Images], None]] = {
    "image_folder": as_folder, "csv": as_csv, "mask_folder": as_masks, "webdataset": as_tars,
    "hugging_face": as_hub,
}  # fmt: skip


@functools.cache
def written(root: Path, name: str) -> str:
    """The path that a placeholder stands for: `csv_photos`, or `map` of classes."""
    if name == "map":
        root.mkdir(exist_ok=True)
        (root / "classes.txt").write_text("dog\ncat\n")
        return str(root / "classes.txt")
    form, kind = next((form, kind) for form in FORMS for kind in KINDS if name == f"{form}_{kind}")
    return str(write(root, kind, form))
