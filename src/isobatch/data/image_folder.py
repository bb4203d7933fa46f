"""`data=image_folder`: one folder per class, below a train folder and a val folder."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobatch.data.base import Splits
from isobatch.data.class_map import ClassMap
from isobatch.data.files import ImageFileOptions
from isobatch.errors import ConfigError
from isobatch.marks import option

WORDS = {"train_dir": "train", "eval_dir": "evaluation", "test_dir": "test"}
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ImageFileOptions):
    """`root/train/<class>/*.jpg` and `root/val/<class>/*.jpg` (also deeper below the class); PNG, WebP, BMP too.

    Args:
        train_dir, eval_dir, test_dir: the folders, relative to `root`; eval_dir is not read where samples are held out (see
            HeldOut), test_dir may be null. train_dir=. where the class folders lie below `root` itself.
        class_map: a text file with a folder a line, in the order of the model's outputs; `folder,class` gives several folders
            one class. Folders that it does not name are left out. null = all folders, sorted.
    """

    name: str = "image_folder"
    train_dir: str = "train"
    eval_dir: str = "val"
    test_dir: str | None = option(None, resume="free")
    class_map: str | None = option(None, resume="free", path="file")  # the class names are compared

    def check(self) -> None:
        """Refuse folders that are missing, empty or do not match, having opened as little as possible.

        Raises:
            ConfigError: see above.
        """
        folders = self._folders()
        classes = self._classes("data.train_dir", folders["train_dir"])
        for key, folder in folders.items():
            found = self._classes(f"data.{key}", folder)
            if found.keys() != classes.keys():
                problem = "; ".join(
                    f"only {where} has {len(names)} ({', '.join(names[:3])}{' ...' if len(names) > 3 else ''})"
                    for where, names in ((folders["train_dir"], sorted(classes.keys() - found.keys())),
                                         (folder, sorted(found.keys() - classes.keys()))) if names)  # fmt: skip
                raise ConfigError("data.root", self.root, f"train and {WORDS[key]} classes differ: {problem}",
                                  "give both the same class folders (one may be empty)")  # fmt: skip
        for folder in folders.values():
            if not any(first_image(folder / name) for name in classes):
                raise ConfigError("data.root", self.root, f"{folder} holds no image",
                                  f"put {', '.join(EXTENSIONS)} files into the class folders below it")  # fmt: skip
        train = folders["train_dir"]
        filled: dict[int, str] = {}
        for name, number in classes.items():
            if len(filled) < 2 and first_image(train / name):
                filled[number] = name
        if len(filled) < 2:
            raise ConfigError("data.root", self.root, f"{train} has images of one class alone ({next(iter(filled.values()))}), "
                              "and nothing can be told apart",
                              f"put {', '.join(EXTENSIONS)} files into a second class folder")  # fmt: skip

    def _folders(self) -> dict[str, Path]:
        """Option -> folder of the splits that are read."""
        root, found = self.checked_root(), {}
        for key in WORDS:
            name = getattr(self, key)
            if name is None or (key == "eval_dir" and self.holds_out):
                continue
            if not (root / name).is_dir():
                held = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
                shown = f"it has {', '.join(held[:4])}" if held else "it has no folder at all"
                ways = ", or data.holdout=0.1 to hold some of the training samples out" if key == "eval_dir" else ""
                raise ConfigError("data.root", self.root, f"has no folder {name} ({shown})",
                                  f"set data.{key}=<its name>, or data.root to the folder above it{ways}")  # fmt: skip
            found[key] = root / name
        return found

    def _classes(self, key: str, folder: Path) -> dict[str, int]:
        """Class folder -> class number."""
        names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
        if not names:
            raise ConfigError("data.root", self.root, f"{folder} has no class folders",
                              f"sort the images into {folder}/<class>/, or set {key}")  # fmt: skip
        if not self.class_map:
            return ClassMap.of(names).number
        number = ClassMap.read(self.class_map).number
        if missing := sorted(number.keys() - set(names)):
            raise ConfigError("data.class_map", self.class_map, f"{folder} has no folder {', '.join(missing[:3])}",
                              "name folders that are there, one with a comma in its name in quotes")  # fmt: skip
        return number

    def load(self, augment: Any, seed: int) -> Splits:
        self.check()
        folders, root = self._folders(), self.checked_root()
        classes = self._classes("data.train_dir", folders["train_dir"])
        found = {key: listed(root, folder, classes) for key, folder in folders.items()}
        told = [line for key, folder in folders.items() for line in found[key].messages(folder, list(classes))]
        names = ClassMap.read(self.class_map).names if self.class_map else list(classes)
        train, evaluation, test = ((found[key].names, found[key].labels) if key in found else None for key in WORDS)
        assert train is not None
        return self.splits(train, evaluation, test, names, augment, told)


@dataclass
class FoundImages:
    """What stands below the class folders of one split.

    Args:
        names, labels: of the images, relative to the root.
        skipped: how many files of which extension no image is read from.
        odd: folders that are not what they seem, in words. filled: class folders that hold an image.
    """

    names: list[str] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)
    filled: set[str] = field(default_factory=set)

    def messages(self, folder: Path, classes: list[str]) -> list[str]:
        """Lines for a person: what was left out, and which classes are empty."""
        lines = list(self.odd)
        if self.skipped:
            most = sorted(self.skipped.items(), key=lambda item: (-item[1], item[0]))[:4]
            kinds = ", ".join(f"{count} {kind or 'without an extension'}" for kind, count in most)
            lines.append(f"{folder}: {self.skipped.total()} file(s) are no {', '.join(EXTENSIONS)} and were skipped ({kinds}"
                         f"{', ...' if len(self.skipped) > 4 else ''})")  # fmt: skip
        empty = [name for name in classes if name not in self.filled]
        if empty:
            lines.append(f"{folder}: {len(empty)} of {len(classes)} classes have no image ({', '.join(empty[:4])}"
                         f"{', ...' if len(empty) > 4 else ''})")  # fmt: skip
        return lines


def walked(folder: Path | str, seen: set[tuple[int, int]], found: FoundImages) -> Iterator[str]:
    """Paths of the image files below `folder`, in no particular order.

    Args:
        seen: (device, inode) of folders that are not gone into again, so that a link is followed once and none in a circle.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                status = entry.stat()
                if (status.st_dev, status.st_ino) in seen:
                    found.odd.append(f"{entry.path} leads to a folder that is read already, and is not followed")
                    continue
                seen.add((status.st_dev, status.st_ino))
                yield from walked(entry.path, seen, found)  # no Path, which would drop the ./ that below() counts
            elif entry.name.lower().endswith(EXTENSIONS):
                yield entry.path
            else:
                found.skipped[os.path.splitext(entry.name)[1].lower()] += 1


def below(folder: Path, paths: Iterable[str]) -> list[str]:
    """`paths` that begin with `folder`, relative to it."""
    start = len(os.path.join(folder, ""))
    return [path[start:] for path in paths]


def identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def first_image(folder: Path) -> str | None:
    return next(walked(folder, {identity(folder.parent), identity(folder)}, FoundImages()), None)


def listed(root: Path, folder: Path, classes: dict[str, int]) -> FoundImages:
    """The images of all class folders (with their class numbers), sorted: the same on every file system.

    Raises:
        ConfigError: two classes are one folder.
    """
    found = FoundImages()
    own: dict[tuple[int, int], str] = {}
    for name in classes:
        other = own.setdefault(identity(folder / name), name)
        if other != name:
            raise ConfigError("data.root", root, f"the classes {other} and {name} of {folder} are one and the same folder",
                              "remove one of the two links")  # fmt: skip
    for name, number in classes.items():
        # each class is a root of its own: a link from one class into another would give its images two labels
        seen = {identity(folder), *own}
        paths = sorted(below(folder / name, walked(folder / name, seen, found)))
        folders = {path.rpartition("/")[0] for path in paths}
        within = {part for inner in folders for part in inner.split("/")}
        if inner := sorted(within & set(classes) - {name}):
            found.odd.append(f"{folder / name} holds a folder {inner[0]}, which is a class too: its images count as {name}")
        start = os.path.relpath(folder / name, root)  # for each file it would be most of the time
        found.names += [f"{start}/{path}" for path in paths]
        found.labels += [number] * len(paths)
        found.filled |= {name} if paths else set()
    return found
