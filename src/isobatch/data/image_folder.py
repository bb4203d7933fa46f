"""`data=image_folder`: one folder per class, below a train folder and a val folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.data.base import Splits
from isobatch.data.files import ImageFileOptions
from isobatch.errors import ConfigError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ImageFileOptions):
    """`root/train/<class>/*.jpg` and `root/val/<class>/*.jpg` (also deeper below the class); PNG, WebP, BMP too.

    Args:
        train_dir, eval_dir: the two folders, relative to `root`.
    """

    name: str = "image_folder"
    train_dir: str = "train"
    eval_dir: str = "val"

    def check(self) -> None:
        """Refuse folders that are missing, empty or do not match, having opened as little as possible.

        Raises:
            ConfigError: see above.
        """
        train, evaluation = self._folders()
        classes = self._classes("data.train_dir", train)
        found = self._classes("data.eval_dir", evaluation)
        if found != classes:
            only_train, only_eval = sorted(set(classes) - set(found)), sorted(set(found) - set(classes))
            problem = "; ".join(f"only {where} has {len(names)} ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''})"
                                for where, names in ((train, only_train), (evaluation, only_eval)) if names)  # fmt: skip
            raise ConfigError("data.root", self.root, f"train and evaluation classes differ: {problem}",
                              "give both the same class folders (one may be empty)")  # fmt: skip
        for folder in (train, evaluation):
            if not any(first_image(folder / name) for name in classes):
                raise ConfigError("data.root", self.root, f"{folder} holds no image",
                                  f"put {', '.join(EXTENSIONS)} files into the class folders below it")  # fmt: skip

    def _folders(self) -> tuple[Path, Path]:
        root = self.checked_root()
        for key in ("train_dir", "eval_dir"):
            name = getattr(self, key)
            if not (root / name).is_dir():
                held = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
                shown = f"it has {', '.join(held[:4])}" if held else "it has no folder at all"
                raise ConfigError("data.root", self.root, f"has no folder {name} ({shown})",
                                  f"set data.{key}=<its name>, or data.root to the folder above it")  # fmt: skip
        return root / self.train_dir, root / self.eval_dir

    def _classes(self, key: str, folder: Path) -> list[str]:
        names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
        if not names:
            raise ConfigError("data.root", self.root, f"{folder} has no class folders",
                              f"sort the images into {folder}/<class>/, or set {key}")  # fmt: skip
        return names

    def load(self, augment: Any, seed: int) -> Splits:
        self.check()
        train, evaluation = self._folders()
        classes = self._classes("data.train_dir", train)
        root = self.checked_root()
        return self.splits(listed(root, train, classes), listed(root, evaluation, classes), classes, augment)


def images_below(folder: Path) -> Iterator[str]:
    """Paths of the image files below `folder`, in no particular order."""
    for where, _, files in os.walk(folder, followlinks=True):
        for name in files:
            if name.lower().endswith(EXTENSIONS) and not name.startswith("."):
                yield os.path.join(where, name)


def first_image(folder: Path) -> str | None:
    return next(images_below(folder), None)


def listed(root: Path, folder: Path, classes: list[str]) -> tuple[list[str], list[int]]:
    """(names relative to `root`, class numbers), sorted: the same on every file system."""
    names: list[str] = []
    labels: list[int] = []
    for number, name in enumerate(classes):
        found = sorted(os.path.relpath(path, root) for path in images_below(folder / name))
        names += found
        labels += [number] * len(found)
    return names, labels
