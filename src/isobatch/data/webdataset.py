"""`data=webdataset`: images in tars, as WebDataset lays them out, read by their place.

With the place of every sample known (tar_index.py) the tars are one data set of random access: any order, any number of ranks,
a resume in the middle of an epoch cost what they cost with files, and memory holds no more than a few dozen bytes a sample.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from isobatch.data.base import Splits
from isobatch.data.class_map import ClassMap, numbered
from isobatch.data.files import ImageFileOptions, Names
from isobatch.data.images import LabelledImages
from isobatch.data.tar_index import PICKLED, Members, TarIndex, index_of
from isobatch.errors import ConfigError
from isobatch.marks import option

OPEN_TARS = 64  # per process and split
MOST_TARS = 100_000
SPEAK_S = 10.0  # while an index is made, at most one line in so many seconds
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WebDataset(ImageFileOptions):
    """
    Args:
        train_tars, eval_tars, test_tars: relative to `root`: `train-{000000..000123}.tar`, `train-*.tar`, or both. eval_tars
            are not read where samples are held out (see HeldOut); test_tars may be null.
        image_member, label_member: what is read of each sample, by its extension; null = the first there is of jpg, jpeg,
            png, webp, bmp, and of cls, json, txt. Numbers are class numbers, other labels are numbered in sorted order.
        label_key: where a json holds the label.
        class_map: see ImageFolder; labels take the place of folders.
        cache_dir: where the index of each tar is kept; null = beside it, or below ~/.cache where that cannot be written.
    """

    name: str = "webdataset"
    train_tars: str = "train-*.tar"
    eval_tars: str = "val-*.tar"
    test_tars: str | None = option(None, resume="free")
    image_member: str | None = None
    label_member: str | None = None
    label_key: str = "label"
    class_map: str | None = option(None, resume="free", path="file")  # the class names are compared
    cache_dir: str | None = option(None, resume="free", path="file")

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("image_member", "label_member"):
            value = getattr(self, key)
            if value and str(extension(value)).rsplit(".", 1)[-1] in PICKLED:
                raise ConfigError(f"data.{key}", value, "is a pickle, which can run code and is not read",
                                  "write that member as text, json or an image")  # fmt: skip

    def check(self) -> None:
        """Find the tars and make the indices that are missing: once, before there are ranks, which then find them.

        Raises:
            ConfigError: a tar is missing or cannot be used.
        """
        for key in ("train_tars", *(() if self.holds_out else ("eval_tars",)), *(("test_tars",) if self.test_tars else ())):
            self._indices(key)

    def load(self, augment: Any, seed: int) -> Splits:
        train = self._indices("train_tars")
        texts = texts_of(train)
        given = ClassMap.read(self.class_map) if self.class_map else None
        if given is not None:
            classes, labels = given.names, given.of_labels(texts, self.train_tars)
        others: list[TarImages | None] = []
        for key in ("eval_tars", "test_tars"):
            held = key == "eval_tars" and self.holds_out
            pattern = self.train_tars if held else getattr(self, key)
            if pattern is None:
                others.append(None)
                continue
            tars = train if held else self._indices(key)
            if given is not None:
                theirs = given.of_labels(texts_of(tars), pattern)
            else:
                classes, labels, theirs = numbered(texts, texts_of(tars), ("data.train_tars", f"data.{key}"),
                                                   (self.train_tars, pattern))  # fmt: skip
            others.append(TarImages(tars, theirs, self, None))
        assert others[0] is not None
        return self.made(TarImages(train, labels, self, augment), others[0], classes, (), others[1])

    def _indices(self, key: str) -> list[tuple[Path, TarIndex]]:
        root, members = self.checked_root(), Members(extension(self.image_member), extension(self.label_member), self.label_key)
        tars, setting = tars_of(root, f"data.{key}", getattr(self, key)), f"data.{key}"
        indices: list[TarIndex] = []
        spoken = time.monotonic()
        with ThreadPoolExecutor(8) as pool:  # the headers of a remote tar arrive one by one
            for index in pool.map(lambda tar: index_of(tar, setting, members, self.cache_dir), tars):
                indices.append(index)
                if time.monotonic() - spoken > SPEAK_S:
                    spoken = time.monotonic()
                    log.info("%s: index of %d of %d tars, %d samples", setting, len(indices), len(tars), sum(map(len, indices)))
        return list(zip(tars, indices, strict=True))


def texts_of(tars: list[tuple[Path, TarIndex]]) -> list[str]:
    return [index.labels[i] for _, index in tars for i in range(len(index))]


class TarImages(LabelledImages):
    """Images at known places of tars. One thread at a time may read; processes that are forked from it each may."""

    def __init__(self, tars: list[tuple[Path, TarIndex]], labels: Any, options: Any, transform: Any):
        import numpy

        super().__init__(labels, options, transform)
        indices = [index for _, index in tars]
        self.paths = [str(path) for path, _ in tars]
        self.ends = numpy.cumsum([len(index) for index in indices])
        self.offsets = numpy.concatenate([index.offsets for index in indices])
        self.sizes = numpy.concatenate([index.sizes for index in indices])
        shifts = numpy.cumsum([0, *(len(index.names.blob) for index in indices)])
        ends = [index.names.ends + shift for index, shift in zip(indices, shifts, strict=False)]
        self.names = Names(b"".join(index.names.blob for index in indices), numpy.concatenate(ends))
        self.files: OrderedDict[int, int] = OrderedDict()

    def describe(self, index: int) -> str:
        return f"{self.names[index]} in {self.paths[self._tar(index)]}"

    def data(self, index: int) -> bytes:
        size = int(self.sizes[index])
        found = os.pread(self._file(self._tar(index)), size, int(self.offsets[index]))  # no position that processes share
        if len(found) < size:
            raise OSError("the tar has become shorter than its index says")
        return found

    def _tar(self, index: int) -> int:
        return int(self.ends.searchsorted(index, side="right"))

    def _file(self, tar: int) -> int:
        """The tar's descriptor; the one that was used longest ago is closed where there would be too many."""
        if tar in self.files:
            self.files.move_to_end(tar)
        else:
            if len(self.files) >= OPEN_TARS:
                os.close(self.files.popitem(last=False)[1])
            self.files[tar] = os.open(self.paths[tar], os.O_RDONLY)
        return self.files[tar]

    def __del__(self) -> None:
        for descriptor in getattr(self, "files", {}).values():
            os.close(descriptor)


def extension(text: str | None) -> str | None:
    return text.lower().lstrip(".") if text else None


def tars_of(root: Path, key: str, pattern: str) -> list[Path]:
    """The files that `pattern` names, in its order; what a `*` finds is sorted.

    Raises:
        ConfigError: none, or one of those that braces name is missing.
    """
    if "://" in pattern or pattern.startswith("pipe:"):
        raise ConfigError(key, pattern, "is no path of this machine, and only files can be read by place",
                          "mount or copy the tars")  # fmt: skip
    found: list[Path] = []
    missing: list[str] = []
    if not pattern.strip():
        raise ConfigError(key, pattern, "names no tar", f"set {key}='train-*.tar' or the like")
    names = list(islice(expanded(pattern), MOST_TARS + 1))
    if len(names) > MOST_TARS:
        raise ConfigError(key, pattern, f"names more than {MOST_TARS} tars", "put more samples into each")
    for name in names:
        if any(c in name for c in "*?["):
            found += sorted(root / path for path in glob.glob(name, root_dir=root) if (root / path).is_file())
        elif (root / name).is_file():
            found.append(root / name)
        else:
            missing.append(name)
    if missing:
        raise ConfigError(key, pattern, f"{len(missing)} of the tars are not below {root}, the first is {missing[0]}",
                          f"set {key} to those that there are")  # fmt: skip
    if not found:
        tars = sorted(p.name for p in root.glob("*.tar"))
        shown = f"it has {', '.join(tars[:3])}{' ...' if len(tars) > 3 else ''}" if tars else "it has no tar at all"
        raise ConfigError(key, pattern, f"nothing below {root} is named so ({shown})", f"set {key}=<pattern>, quoted twice "
                          "when it has braces")  # fmt: skip
    return found


def expanded(pattern: str) -> Iterator[str]:
    """Braces as in a shell: `{000..012}` counts, keeping leading zeros; `{a,b}` lists. They may stand next to each other."""
    match = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if match is None:
        yield pattern
        return
    first, last, listed = match.groups()
    values = listed.split(",") if listed else (f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1))
    for value in values:
        for rest in expanded(pattern[match.end() :]):
            yield pattern[: match.start()] + value + rest
