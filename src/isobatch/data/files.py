"""Labelled image files: a list that costs little memory, the dataset over it, and the options that such datasets share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.checks import choice, positive, within
from isobatch.data.base import DataInfo, Reading, Split, Splits
from isobatch.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class Names:
    """File names in one block of bytes: a million strings would be copied page by page into every worker process."""

    def __init__(self, names: Sequence[str]):
        import numpy

        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self.blob = b"".join(encoded)
        self.ends = numpy.cumsum([len(e) for e in encoded], dtype=numpy.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return self.blob[start : int(self.ends[index])].decode("utf-8", "surrogateescape")


class ImageFiles:
    """`dataset[i] -> (pixels (C, size, size) uint8, class number)`.

    Args:
        transform: what augments (augment.SampleTransform), or None: then the evaluation's center crop is read.
    """

    def __init__(self, root: Path, names: Sequence[str], labels: Sequence[int], options: ImageFileOptions, transform: Any):
        import torch

        from isobatch import pixels

        self.root, self.names, self.options, self.transform = str(root), Names(names), options, transform
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.read = pixels.read_image
        self.box = pixels.center_box(options.crop_pct) if transform is None else transform.box

    def __len__(self) -> int:
        return len(self.names)

    def describe(self, index: int) -> str:
        return f"{self.root}/{self.names[index]}"

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        options = self.options
        image = self.read(self.describe(index), self.box, options.image_size, options.interpolation, options.in_chans,
                          options.decode == "fast")  # fmt: skip
        if self.transform is not None:
            image = self.transform.after(image)
        return image, int(self.labels[index])


@dataclass(frozen=True, kw_only=True)
class ImageFileOptions(Reading):
    """What all datasets of image files share.

    Args:
        root: the folder that holds everything.
        image_size: side in pixels that the model sees.
        crop_pct: share of the shorter side that an evaluation looks at.
        interpolation: bilinear or bicubic, antialiased.
        decode: `fast` reads JPEGs at a reduced scale where the crop is still large enough, `full` never.
        mean, std: per channel, of pixels in 0 .. 1 (default: ImageNet's).
        in_chans: 3 (RGB) or 1 (grey).
    """

    root: str | None = None
    image_size: int = 224
    crop_pct: float = 0.875
    interpolation: str = "bilinear"
    decode: str = "fast"
    mean: list[float] | None = None
    std: list[float] | None = None
    in_chans: int = 3
    kind = "images"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("data.image_size", self.image_size)
        within("data.crop_pct", self.crop_pct, 0.01, 1)
        choice("data.interpolation", self.interpolation, ("bilinear", "bicubic"))
        choice("data.decode", self.decode, ("fast", "full"))
        choice("data.in_chans", self.in_chans, (1, 3))
        for key in ("mean", "std"):
            value = getattr(self, key)
            if value is not None and (len(value) != self.in_chans or (key == "std" and min(value) <= 0)):
                raise ConfigError(f"data.{key}", value, f"is not one number per channel ({self.in_chans})",
                                  f"set data.{key}=null for ImageNet's")  # fmt: skip

    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(mean, std); for grey images ImageNet's are averaged over the channels."""
        mean, std = self.mean or IMAGENET_MEAN, self.std or IMAGENET_STD
        if len(mean) != self.in_chans:
            mean = [sum(mean) / len(mean)]
        if len(std) != self.in_chans:
            std = [sum(std) / len(std)]
        return tuple(mean), tuple(std)

    def checked_root(self) -> Path:
        """Raise ConfigError unless `root` is a folder."""
        if not self.root:
            raise ConfigError("data.root", self.root, "is not set", "set data.root=<folder of the images>")
        path = Path(self.root)
        if not path.is_dir():
            problem = "is a file, not a folder" if path.exists() else "no such folder"
            raise ConfigError("data.root", self.root, problem, "set data.root to the folder of the images")
        return path

    def splits(self, train: tuple[list[str], list[int]], evaluation: tuple[list[str], list[int]], classes: Sequence[str],
               augment: Any) -> Splits:  # fmt: skip
        """Splits over files, named relative to `root`."""
        mean, std = self.normalization()
        shape = (self.in_chans, self.image_size, self.image_size)
        info = DataInfo(str(getattr(self, "name", "files")), shape, len(classes), mean, std, tuple(classes))

        def split(files: tuple[list[str], list[int]], transform: Any) -> Split:
            dataset = ImageFiles(self.checked_root(), *files, self, transform)
            return Split(dataset, targets=lambda: dataset.labels, info=info)

        return Splits(split(train, augment), split(evaluation, None), info)
