"""Samples without labels, for `task=predict`: a folder of images, one image, a csv that lists them, tars, or any data set."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isobatch.data.base import DataInfo, Split
from isobatch.data.csv_file import is_file
from isobatch.data.files import ImageFiles, Names
from isobatch.data.image_folder import EXTENSIONS, FoundImages, below, identity, walked
from isobatch.data.images import ImageOptions
from isobatch.data.tar_index import Members, index_of
from isobatch.data.webdataset import TarImages, tars_of
from isobatch.errors import ConfigError

KEY = "predict.path"


class Inputs:
    """`dataset` without its labels: [i] -> (input, 0). A pair is input and label; anything else is an input alone.

    Args:
        keeps: labels stay where there are some, for a collate of the user's own.
    """

    def __init__(self, dataset: Any, keeps: bool = False):
        self.dataset, self.keeps = dataset, keeps

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:  # describe
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        sample = self.dataset[index]
        value, label = sample if isinstance(sample, tuple | list) and len(sample) == 2 else (sample, 0)
        return value, label if self.keeps else 0


def without_labels(split: Split) -> Split:
    """A split of any data set, for its inputs alone."""
    if split.tensors is not None:
        return split
    return Split(Inputs(split.dataset, split.collate is not None), info=split.info, light=split.light, collate=split.collate)


def check(path: str) -> None:
    """Refuse a path that leads nowhere, having opened nothing.

    Raises:
        ConfigError: there is neither a folder, a file nor tars.
    """
    if not Path(path).exists() and not path.endswith(".tar"):
        raise ConfigError(KEY, path, "no such file or folder", "set predict.path to a folder of images, a csv or a tar")


def load(path: str, options: ImageOptions, info: DataInfo, column: str) -> Split:
    """The images that `path` means, read as `options` say.

    Args:
        info: what becomes of their pixels. column: of a csv that holds paths, relative to the csv's own folder.
    Raises:
        ConfigError: there are none.
    """
    place = Path(path)
    dataset: Any
    if path.endswith(".tar"):
        dataset = _tars(place, options)
    elif place.is_dir():
        found = FoundImages()
        names = sorted(below(place, walked(place, {identity(place)}, found)))
        if not names:
            raise ConfigError(KEY, path, f"holds no image ({', '.join(EXTENSIONS)})", "set predict.path to a folder that does")
        dataset = ImageFiles(place, names, [0] * len(names), options, None)
    elif place.suffix.lower() == ".csv":
        names = listed(place, column)
        dataset = ImageFiles(place.parent, names, [0] * len(names), options, None)
    elif place.suffix.lower() in EXTENSIONS:
        dataset = ImageFiles(place.parent, [place.name], [0], options, None)
    else:
        raise ConfigError(KEY, path, "is no folder, csv, tar or image", f"name one of them ({', '.join(EXTENSIONS)})")
    dataset.show(options.eval_size or options.image_size)
    return Split(dataset, info=info)


def listed(path: Path, column: str) -> list[str]:
    """The paths in a csv with a header line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            header = reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
            if header.count(column) != 1:
                has = f"has the columns {', '.join(header)}" if header else "is empty"
                raise ConfigError("predict.column", column, f"{path} {has}", "set predict.column to one that is there once")
            names = [(row[column] or "").strip() for row in reader]
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise ConfigError(KEY, path, f"cannot be read as text with commas ({error})", "write it as UTF-8") from None
    if not names or "" in names:
        raise ConfigError(KEY, path, "lists no image" if not names else f"line {names.index('') + 2} has no path",
                          "write a path on every line")  # fmt: skip
    if not is_file(path.parent / names[0]):
        raise ConfigError(KEY, path, f"lists {names[0][:200]}, which is not there",
                          "paths are relative to the csv's own folder")  # fmt: skip
    return names


def _tars(place: Path, options: ImageOptions) -> TarImages:
    """The images in one tar, or in those that a pattern (`photos-*.tar`, `{00..12}.tar`) names."""
    members = Members(getattr(options, "image_member", None), labelled=False)
    root, pattern = (place.parent, place.name) if place.parent.is_dir() else (Path("/"), str(place).lstrip("/"))
    indices = [(tar, index_of(tar, KEY, members, getattr(options, "cache_dir", None))) for tar in tars_of(root, KEY, pattern)]
    return TarImages(indices, [0] * sum(len(index) for _, index in indices), options, None)


def names_of(split: Split, numbers: Sequence[int]) -> list[str]:
    """How a person finds these samples: a file as it was listed, a member of a tar, what the data set says, else its number."""
    dataset: Any = split.dataset
    names = getattr(dataset, "names", None)
    if isinstance(names, Names):
        return [names[i] for i in numbers]
    describe = getattr(dataset, "describe", None)
    return [str(i) if describe is None else str(describe(i)) for i in numbers]
