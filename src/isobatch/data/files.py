"""Labelled image files: a list that costs little memory, the dataset over it, and the options of such datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.data.base import Splits
from isobatch.data.images import ImageOptions, LabelledImages
from isobatch.errors import ConfigError
from isobatch.marks import option


class Names:
    """Texts in one block of bytes: a million strings would be copied page by page into every worker process.

    Args:
        blob, ends: the texts one after another, and where each one ends, (N,) int64.
    """

    def __init__(self, blob: bytes, ends: Any):
        self.blob, self.ends = blob, ends

    @classmethod
    def of(cls, names: Sequence[str]) -> Names:
        import numpy

        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        return cls(b"".join(encoded), numpy.cumsum([len(e) for e in encoded], dtype=numpy.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return self.blob[start : int(self.ends[index])].decode("utf-8", "surrogateescape")


Listed = tuple[list[str], Any]  # names of files, and their class numbers or rows of numbers


class ImageFiles(LabelledImages):
    """Files named relative to `root`."""

    def __init__(self, root: Path, names: Sequence[str], labels: Sequence[int], options: ImageOptions, transform: Any):
        super().__init__(labels, options, transform)
        self.root, self.names = str(root), Names.of(names)

    def describe(self, index: int) -> str:
        return f"{self.root}/{self.names[index]}"

    def data(self, index: int) -> bytes:
        with open(self.describe(index), "rb", buffering=0) as file:
            return file.read()


@dataclass(frozen=True, kw_only=True)
class ImageFileOptions(ImageOptions):
    """
    Args:
        root: the folder that holds everything.
    """

    root: str | None = option(None, resume="free", path="file")

    def checked_root(self) -> Path:
        """Raise ConfigError unless `root` is a folder."""
        if not self.root:
            raise ConfigError("data.root", self.root, "is not set", "set data.root=<folder of the data>")
        path = Path(self.root)
        if not path.is_dir():
            problem = "is a file, not a folder" if path.exists() else "no such folder"
            raise ConfigError("data.root", self.root, problem, "set data.root to the folder of the data")
        return path

    def splits(self, train: Listed, evaluation: Listed | None, test: Listed | None, classes: Sequence[str], augment: Any,
               notes: Sequence[str] = (), **known: Any) -> Splits:  # fmt: skip
        """Splits over files, named relative to `root`. `evaluation` None: it is held out of `train`. `notes`: what a person
        should hear of them; `known`: see `made`."""
        root = self.checked_root()
        return self.made(ImageFiles(root, *train, self, augment), ImageFiles(root, *(evaluation or train), self, None), classes,
                         notes, None if test is None else ImageFiles(root, *test, self, None), **known)  # fmt: skip
