"""`data=mask_folder`: images, and for each a mask that holds the class of every pixel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.checks import sides
from isobatch.data.base import Splits
from isobatch.data.files import ImageFileOptions, ImageFiles, Names
from isobatch.data.image_folder import FoundImages, below, identity, walked
from isobatch.errors import ConfigError
from isobatch.marks import option

if TYPE_CHECKING:
    from torch import Tensor

    from isobatch.pixels import Box

LEFT_OUT = -100  # the label that torch's losses leave out
MODES = ("1", "L", "P", "I", "I;16")  # of files whose values are class numbers


class MaskedImages(ImageFiles):
    """`dataset[i] -> (pixels (C, height, width) uint8, class numbers (height, width) int64)`; both are cut out alike."""

    def __init__(self, root: Path, names: Sequence[str], masks: Sequence[str], options: MaskFolder, transform: Any):
        super().__init__(root, names, [0] * len(names), options, transform)
        self.masks, self.classes, self.ignored = Names.of(masks), len(options.classes), options.ignored

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        seen: list[tuple[int, int, Box]] = []

        def box(width: int, height: int) -> Box:
            seen.append((width, height, self.box(width, height)))
            return seen[-1][2]

        way = str(self.options.interpolation) if self.transform is None else self.transform.way()
        image = self.decode(self.data(index), box, self.size, way, self.how)
        mask = self.mask(f"{self.root}/{self.masks[index]}", *seen[0])
        return (image, mask) if self.transform is None else self.transform.with_mask(image, mask, LEFT_OUT)

    def beside(self, index: int) -> bytes:
        """The file of the mask, for a fingerprint of contents."""
        return Path(f"{self.root}/{self.masks[index]}").read_bytes()

    def mask(self, path: str, width: int, height: int, box: Box) -> Tensor:
        """
        Raises:
            OSError: it is no mask for an image of this size. IndexError: it has a number that is no class.
        """
        import numpy
        import torch
        from PIL import Image

        with Image.open(path) as file:
            if file.mode not in MODES or file.size != (width, height):
                raise OSError(f"its mask {path} has {file.size[0]} x {file.size[1]} pixels of mode {file.mode}: it needs one "
                              f"number for each of {width} x {height} pixels")  # fmt: skip
            left, top, wide, high = box
            height, width = sides(self.size)
            cut = file.resize((width, height), Image.Resampling.NEAREST, (left, top, left + wide, top + high))
            values = torch.from_numpy(numpy.array(cut).astype(numpy.int64))
        wrong = (values < 0) | (values >= self.classes)
        if self.ignored is not None:
            left_out = values == self.ignored
            wrong &= ~left_out
            values[left_out] = LEFT_OUT
        if bool(wrong.any()):
            number = int(values[wrong][0])
            raise IndexError(f"its mask {path} has the class {number}, and the classes are 0 to {self.classes - 1}")
        return values


@dataclass(frozen=True, kw_only=True)
class MaskFolder(ImageFileOptions):
    """`root/train/images/*.jpg` with `root/train/masks/*.png` of the same names, and the same below `val`.

    A mask has one channel, whose values are class numbers (a palette's too), and the size of its image, upright.

    Args:
        train_dir, eval_dir, test_dir: relative to `root`; eval_dir is not read where samples are held out, and test_dir may
            be null.
        images, masks: the folders in each.
        classes: their names, in the order of their numbers.
        ignored: a value that is no class: such pixels count nowhere (null: there is none).
        crop_pct: share of the shorter side that an evaluation looks at, in a centered square.
    """

    name: str = "mask_folder"
    train_dir: str = "train"
    eval_dir: str = "val"
    test_dir: str | None = option(None, resume="free")
    images: str = "images"
    masks: str = "masks"
    classes: list[str] = field(default_factory=list)
    ignored: int | None = 255
    crop_pct: float | None = 1.0

    def check(self) -> None:
        """Refuse folders that are missing or do not match, having opened no image.

        Raises:
            ConfigError: see above.
        """
        if len(self.classes) < 2:
            raise ConfigError("data.classes", self.classes, "names less than two classes",
                              "set data.classes=[background,road] in the order of their numbers in the masks")  # fmt: skip
        for key in self.read:
            self._pairs(key)

    @property
    def read(self) -> list[str]:
        return ["train_dir", *([] if self.holds_out else ["eval_dir"]), *(["test_dir"] if self.test_dir else [])]

    def _pairs(self, key: str) -> tuple[list[str], list[str]]:
        """Images and masks, relative to the root, in the order of their names."""
        root, inner = self.checked_root(), getattr(self, key)
        found = []
        for kind in (self.images, self.masks):
            folder = root / inner / kind
            if not folder.is_dir():
                raise ConfigError("data.root", self.root, f"has no folder {inner}/{kind}",
                                  f"set data.{key}, data.images and data.masks to its names")  # fmt: skip
            start = os.path.join(os.path.relpath(folder, root), "").removeprefix("./")
            paths = sorted(below(folder, walked(folder, {identity(folder)}, FoundImages())))
            found.append({os.path.splitext(path)[0]: f"{start}{path}" for path in paths})
        images, masks = found
        if not images:
            raise ConfigError("data.root", self.root, f"{inner}/{self.images} holds no image", "put some there")
        if missing := [path for name, path in images.items() if name not in masks]:
            raise ConfigError("data.root", self.root, f"{missing[0]} has no mask of its name in {inner}/{self.masks}",
                              "add it, or take the image out")  # fmt: skip
        return list(images.values()), [masks[name] for name in images]

    def load(self, augment: Any, seed: int) -> Splits:
        import torch

        self.check()
        if augment is not None and augment.policy:
            raise ConfigError("augment.name", augment.policy, "moves pixels that a mask would not follow",
                              "set augment=simple")  # fmt: skip
        root = self.checked_root()
        pairs = {key: self._pairs(key) for key in self.read}
        train, evaluation = (MaskedImages(root, *pairs.get(key, pairs["train_dir"]), self, transform)
                             for key, transform in (("train_dir", augment), ("eval_dir", None)))  # fmt: skip
        test = MaskedImages(root, *pairs["test_dir"], self, None) if self.test_dir else None
        found = self.made(train, evaluation, self.classes, test=test, labels="pixels")
        for split in (found.train, found.eval, *([found.test] if found.test else [])):
            split.targets = lambda: torch.empty(0, 0)  # no sample has a class of its own
        return found
