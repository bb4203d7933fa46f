"""`data=hugging_face`: an image data set of Hugging Face's `datasets`, from the hub or from a folder.

Rows are read from the Arrow table in its own files: any row is found at once, workers share the pages, and images are decoded
here, as those of all other image data sets.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.data.base import Splits
from isobatch.data.class_map import ClassMap, numbered
from isobatch.data.images import ImageOptions, LabelledImages
from isobatch.errors import ConfigError, reason
from isobatch.marks import option

EVAL_SPLITS = ("validation", "valid", "val", "dev", "test")
IMAGE_NAMES = ("image", "img")
LABEL_NAMES = ("label", "labels", "class", "fine_label", "target")
PART = re.compile(r"([^\[\]]+)(?:\[(\d*)(%?):(\d*)(%?)\])?")


@dataclass(frozen=True, kw_only=True)
class HuggingFace(ImageOptions):
    """Code that a data set brings along is never run.

    Args:
        path: a name on the hub, a folder of images or tables, or what `save_to_disk` wrote; folders need no network.
        subset: one of several configurations that a data set has.
        revision: of a data set on the hub: a tag or commit; null = the newest.
        train_split, eval_split: names, or parts as in `train[:90%]`; eval_split null = the first there is of validation, valid,
            val, dev, test; where samples are held out (see HeldOut) there need not be one. test_split: null = none.
        image_column, label_column: null = the only one that can be meant.
        class_map: see ImageFolder; labels, or the names of their classes, take the place of folders.
        cache_dir: where downloads and tables are kept; null = below ~/.cache/huggingface.
    """

    name: str = "hugging_face"
    path: str | None = option(None, path="maybe")
    subset: str | None = None
    revision: str | None = None
    train_split: str = "train"
    eval_split: str | None = None
    test_split: str | None = option(None, resume="free")
    image_column: str | None = None
    label_column: str | None = None
    class_map: str | None = option(None, resume="free", path="file")  # the class names are compared
    cache_dir: str | None = option(None, resume="free", path="file")

    def check(self) -> None:
        """Raise ConfigError when the package, the folder, or a split of a saved data set is missing."""
        if not self.path:
            raise ConfigError("data.path", self.path, "is not set", "set data.path=<name on the hub, or folder>")
        if importlib.util.find_spec("datasets") is None:
            raise ConfigError("data.name", self.name, "needs the package datasets, which is not installed",
                              "pip install 'isobatch[hugging_face]'")  # fmt: skip
        folder = Path(self.path).expanduser()
        if not folder.is_dir() and (folder.is_absolute() or self.path[0] in ".~" or self.path.count("/") > 1):
            raise ConfigError("data.path", self.path, "is a file" if folder.exists() else "no such folder",
                              "set data.path to the folder, or to a name on the hub")  # fmt: skip
        if (folder / "state.json").is_file():
            raise ConfigError("data.path", self.path, "is one split that was saved alone",
                              "save both together: DatasetDict(train=..., validation=...).save_to_disk(...)")  # fmt: skip
        if self.revision is not None and folder.is_dir():
            raise ConfigError("data.revision", self.revision, f"{self.path} is a folder, which has no revisions",
                              "set data.revision=null")  # fmt: skip
        saved = folder / "dataset_dict.json"
        if saved.is_file():
            if self.subset is not None:
                raise ConfigError("data.subset", self.subset, f"what save_to_disk wrote to {self.path} has no subsets",
                                  "set data.subset=null")  # fmt: skip
            self._names(json.loads(saved.read_text(encoding="utf-8"))["splits"])

    def load(self, augment: Any, seed: int) -> Splits:
        self.check()
        splits = self._open()
        names = self._names(list(splits))
        train = part(splits, "train_split", names["train_split"])
        image, label = self._columns(train)
        named = getattr(train.features[label], "names", None) or ()
        found: dict[str, ArrowImages] = {}
        for key, name in list(names.items())[1:]:
            other, setting = part(splits, key, name), f"data.{key}"
            for column in (image, label):
                if column not in other.features:
                    raise ConfigError(setting, name, f"has no column {column}, only {', '.join(other.features)}",
                                      f"set {setting} to one that has")  # fmt: skip
            if self.class_map:
                given = ClassMap.read(self.class_map)
                labels = given.of_labels(self._texts(train, label), names["train_split"])
                numbers, named = given.of_labels(self._texts(other, label), name), given.names
                found[key] = ArrowImages(other, image, name, numbers, self, None)
                continue
            theirs = aligned(self._labels(other, label), getattr(other.features[label], "names", None) or (), named, setting)
            classes, labels, numbers = numbered(self._labels(train, label), theirs, ("data.train_split", setting),
                                                (names["train_split"], name), len(named))  # fmt: skip
            found[key] = ArrowImages(other, image, name, numbers, self, None)
        return self.made(ArrowImages(train, image, names["train_split"], labels, self, augment), found["eval_split"],
                         named or classes, (), found.get("test_split"))  # fmt: skip

    def _open(self) -> Any:
        import datasets

        assert self.path is not None
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        folder = Path(self.path).expanduser()
        try:
            if (folder / "dataset_dict.json").is_file():
                return datasets.load_from_disk(str(folder))
            source, revision = (str(folder), None) if folder.is_dir() else (self.path, self.revision)
            return datasets.load_dataset(source, self.subset, revision=revision, cache_dir=self.cache_dir)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise self._refusal(error, folder.is_dir()) from None

    def _refusal(self, error: Exception, local: bool) -> ConfigError:
        """What went wrong in one line. The kinds of errors are those of datasets 4 and 5."""
        text = reason(error, 240)
        if isinstance(error, ConnectionError):
            return ConfigError("data.path", self.path, f"the hub cannot be reached, and there is no such folder ({text})",
                               "check the network, or set data.path to a folder that save_to_disk made elsewhere")  # fmt: skip
        if "onfig" in text and isinstance(error, ValueError):  # "Config name is missing", "BuilderConfig ... not found"
            return ConfigError("data.subset", self.subset, text, "set data.subset to one of them")
        if "scripts are no longer supported" in text:
            return ConfigError("data.path", self.path, "needs a program of its own to be read, which is never run",
                               "convert it to parquet or a folder of images first")  # fmt: skip
        way_out = "set data.path to a folder that `datasets` can read" if local else (
            "check its name and revision; for a private one, log in with `hf auth login`")  # fmt: skip
        return ConfigError("data.path", self.path, f"could not be loaded ({type(error).__name__}: {text})", way_out)

    def _names(self, there: list[str]) -> dict[str, str]:
        """Option -> split, as asked for; refuses those that are not `there`."""
        chosen = self.eval_split or next((name for name in EVAL_SPLITS if name in there), None)
        if self.holds_out:
            chosen = self.train_split
        if chosen is None:
            raise ConfigError(
                "data.eval_split",
                None,
                f"nothing to evaluate on, there is only {', '.join(there)}",
                "set data.holdout=0.1, or data.eval_split to a part such as '\"train[90%:]\"', data.train_split to the rest",
            )
        names = {"train_split": self.train_split, "eval_split": chosen}
        if self.test_split is not None:
            names["test_split"] = self.test_split
        for key, name in names.items():
            match = PART.fullmatch(name)
            if match is None or match[1] not in there:
                raise ConfigError(f"data.{key}", name, f"the data set has {', '.join(there)}",
                                  f"set data.{key} to one of them, or a part as in '\"train[:90%]\"'")  # fmt: skip
        return names

    def _columns(self, dataset: Any) -> tuple[str, str]:
        """(image column, label column)."""
        import datasets

        features = dataset.features
        images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
        labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
        plain = [name for name in LABEL_NAMES if isinstance(features.get(name), datasets.Value)]
        image = chosen_column("image_column", self.image_column, images, IMAGE_NAMES, features)
        label = chosen_column("label_column", self.label_column, labels or plain, LABEL_NAMES[:1], features)
        if image not in images and getattr(features[image], "dtype", "") not in ("binary", "large_binary"):
            raise ConfigError("data.image_column", image, f"holds {features[image]}, no encoded images",
                              f"choose one of {', '.join(images) or 'another data set'}, or cast it to Image()")  # fmt: skip
        return image, label

    def _texts(self, dataset: Any, column: str) -> list[str]:
        """(N,) labels as a person reads them: the names of classes, where they have some."""
        names = getattr(dataset.features[column], "names", None) or ()
        labels = self._labels(dataset, column)
        if isinstance(labels, list):
            return labels
        return [names[i] if 0 <= i < len(names) else str(i) for i in labels.tolist()]

    def _labels(self, dataset: Any, column: str) -> Any:
        """(N,) labels, as an array of integers or a list of texts."""
        import datasets

        found, kind = dataset.data.column(column), dataset.features[column]
        dtype = getattr(kind, "dtype", "")
        if not isinstance(kind, datasets.ClassLabel | datasets.Value) or not re.match("u?int|bool|string|large_string", dtype):
            raise ConfigError("data.label_column", column, f"holds {kind}, no classes", "choose a column of integers or texts")
        if found.null_count:
            raise ConfigError("data.label_column", column, f"{found.null_count} samples have no label",
                              "choose another column, or filter them out")  # fmt: skip
        if "string" in dtype:
            return [str(label) for label in found.to_pylist()]
        return found.to_numpy().astype("int64")


class ArrowImages(LabelledImages):
    """Encoded images in a column of an Arrow table, which holds their bytes or the paths of their files."""

    def __init__(self, dataset: Any, column: str, split: str, labels: Any, options: HuggingFace, transform: Any):
        super().__init__(labels, options, transform)
        self.column, self.name = dataset.data.column(column), f"row {{}} of {split} of {options.path}"

    def describe(self, index: int) -> str:
        cell = self.column[index].as_py()
        path = cell.get("path") if isinstance(cell, dict) else None
        return (f"{path}, " if path else "") + self.name.format(index)

    def data(self, index: int) -> bytes:
        cell = self.column[index].as_py()
        if isinstance(cell, dict):
            if cell["bytes"] is None and cell["path"] is not None:
                with open(cell["path"], "rb", buffering=0) as file:
                    return file.read()
            cell = cell["bytes"]
        if cell is None:
            raise OSError("the row holds no image")
        return bytes(cell)


def aligned(labels: Any, theirs: Sequence[str], ours: Sequence[str], key: str = "data.eval_split") -> Any:
    """Class numbers (N,) of a split that numbers its classes as `theirs`, as numbers of `ours`.

    Raises:
        ConfigError: a label of a class that `ours` lacks.
    """
    if not (theirs and ours) or list(theirs) == list(ours):
        return labels
    import numpy

    place = {name: i for i, name in enumerate(ours)}
    lacking = sorted({theirs[i] for i in numpy.unique(labels).tolist() if 0 <= i < len(theirs)} - place.keys())
    if lacking:
        shown = ", ".join(ours[:8]) + (", ..." if len(ours) > 8 else "")
        raise ConfigError(key, None, f"has samples of {', '.join(lacking[:3])}, and the train split has the "
                          f"classes {shown}", "give both the same classes")  # fmt: skip
    table = numpy.array([place.get(name, -1) for name in theirs] + [-1])  # the last one: for the hub's -1, no label
    return table[labels]


def part(splits: Any, key: str, name: str) -> Any:
    """The split `name` of `splits`, or the part of it that `name[from:to]` says, in samples or per cent."""
    match = PART.fullmatch(name)
    assert match is not None  # HuggingFace._names
    whole = splits[match[1]]
    begin, end = (
        min(len(whole), int(number) * len(whole) // 100 if percent else int(number)) if number else default
        for number, percent, default in ((match[2], match[3], 0), (match[4], match[5], len(whole)))
    )
    if begin >= end:
        raise ConfigError(f"data.{key}", name, f"is empty: {match[1]} has {len(whole)} samples", "choose a larger part")
    return whole.select(range(begin, end))  # a contiguous range is cut out of the table, without a list of rows


def chosen_column(key: str, asked: str | None, fitting: list[str], preferred: tuple[str, ...], features: Any) -> str:
    """`asked`, or the only one of `fitting`, or the one of these that has a usual name."""
    if asked is not None:
        if asked not in features:
            raise ConfigError(f"data.{key}", asked, f"no such column; there are {', '.join(features)}", "choose one of them")
        return asked
    usual = [name for name in preferred if name in fitting]
    if len(fitting) != 1 and not usual:
        problem = f"{', '.join(fitting)} could be meant" if fitting else f"none of the columns {', '.join(features)} fits"
        raise ConfigError(f"data.{key}", None, problem, f"set data.{key}")
    return fitting[0] if len(fitting) == 1 else usual[0]
