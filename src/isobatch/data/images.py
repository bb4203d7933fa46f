"""Labelled images that are decoded as they are read, wherever their bytes lie: what such datasets and their options share."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from isobatch.checks import Size, choice, positive, sides, within
from isobatch.data.base import DataInfo, Reading, Split, Splits
from isobatch.data.held_out import HeldOut, SomeSamples
from isobatch.errors import ConfigError
from isobatch.marks import option

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_SIDE = 65535  # of a JPEG
USUAL = {"image_size": 224, "crop_pct": 0.875, "interpolation": "bilinear"}  # where neither a person nor weights say otherwise
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class LabelledImages(ABC):
    """`dataset[i] -> (pixels (C, height, width) uint8, class number)`, or a row of float32 in the place of the number.

    Args:
        labels: (N,) class numbers, or rows (N, K) of float32.
        transform: what augments (augment.SampleTransform), or None: then the evaluation's center crop is read.
    """

    def __init__(self, labels: Any, options: ImageOptions, transform: Any):
        import numpy

        from isobatch import pixels

        options = options.settled({})
        assert options.image_size is not None and options.crop_pct is not None
        rows = getattr(labels, "ndim", 1) == 2
        # not a tensor: reading one number of it costs 20 times more
        self.labels = numpy.asarray(labels, dtype=numpy.float32 if rows else numpy.int64)
        self.options, self.transform, self.size = options, transform, options.image_size
        black, white = options.pixel_range or (None, None)
        self.stages: list[tuple[int, Size]] = []  # (first epoch, size of its images)
        self.decode, self.how = pixels.decode_crop, pixels.Decoding(
            options.in_chans, options.decode == "fast", options.exif == "apply", black, white,
            options.max_pixels or pixels.MOST_PIXELS,
        )  # fmt: skip
        self.box = pixels.center_box(options.crop_pct, self.size) if transform is None else transform.box

    def show(self, size: Size) -> None:
        """Images as large as that from now on; an evaluation's crop is of its aspect."""
        from isobatch import pixels

        self.size = size
        if self.transform is None:
            assert self.options.crop_pct is not None
            self.box = pixels.center_box(self.options.crop_pct, size)

    def at_epoch(self, epoch: int) -> None:
        """Samples that are read from now on are of this epoch, and as large as its images are."""
        for begin, size in self.stages:
            if begin <= epoch:
                self.size = size

    @property
    def largest_epoch(self) -> int:
        """One whose images are the largest."""
        return max(self.stages, key=lambda stage: math.prod(sides(stage[1])))[0] if self.stages else 0

    @abstractmethod
    def data(self, index: int) -> bytes:
        """Image `index` as a file holds it."""

    @abstractmethod
    def describe(self, index: int) -> str:
        """How a person finds image `index`."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        options = self.options
        way = str(options.interpolation) if self.transform is None else self.transform.way()
        image = self.decode(self.data(index), self.box, self.size, way, self.how)
        if self.transform is not None:
            image = self.transform.after(image)
        return image, self.label(index)

    def label(self, index: int) -> Any:
        label = self.labels[index]
        return int(label) if self.labels.ndim == 1 else torch_row(label)


def one_of(labels: Any) -> Any:
    """(N,) class numbers, by which samples are held out; rows of labels or numbers are all alike."""
    return labels if labels.ndim == 1 else (0 * labels[:, 0]).astype("int64")


def torch_row(row: Any) -> Tensor:
    import torch

    return torch.from_numpy(row)


@dataclass(frozen=True, kw_only=True)
class ImageOptions(HeldOut, Reading):
    """What all datasets of encoded images share.

    `image_size`, `crop_pct`, `interpolation`, `mean`, `std`: null = as the model's first weights know images (see `settled`).

    Args:
        image_size: side in pixels that the model sees, or [height, width]. eval_size: the same in evaluations, for models that
            take any (null: image_size).
        sizes: [[epoch, size], ...]: what training images are from which epoch on, for models that take any; the first epoch
            is 0. null = always image_size.
        crop_pct: share of the shorter side that an evaluation looks at.
        interpolation: bilinear or bicubic, antialiased.
        decode: `fast` reads JPEGs at a reduced scale where the crop is still large enough, `full` never.
        exif: `apply` turns photos upright as their EXIF orientation says, `ignore` takes them as they are stored.
        pixel_range: [black, white] of files with more than 8 bits a channel (null: 16 bits are 0 .. 65535 and floats 0 .. 1;
            32-bit integers have no range of their own and need one).
        max_pixels: of a file that is decoded at all (null: Pillow's 179 million).
        fingerprint: what plan.json says of the samples, to compare runs by: digests of their `names` and labels, or of the
            `contents` of all files too, which are read once for that.
        mean, std: per channel, of pixels in 0 .. 1.
        in_chans: 3 (RGB) or 1 (grey).
    """

    image_size: Any = None
    sizes: Any = None
    eval_size: Any = None
    crop_pct: float | None = None
    interpolation: str | None = None
    decode: str = "fast"
    exif: str = "apply"
    pixel_range: list[float] | None = None
    max_pixels: int | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    in_chans: int = 3
    fingerprint: str = option("names", resume="free")
    kind = "images"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("data.image_size", 1 if self.image_size is None else self.image_size)
        if self.sizes is not None:
            check_sizes(self.sizes)
        check_size("data.eval_size", 1 if self.eval_size is None else self.eval_size)
        within("data.crop_pct", 1 if self.crop_pct is None else self.crop_pct, 0.01, 1)
        choice("data.interpolation", self.interpolation, (None, "bilinear", "bicubic"))
        choice("data.decode", self.decode, ("fast", "full"))
        choice("data.in_chans", self.in_chans, (1, 3))
        choice("data.fingerprint", self.fingerprint, ("names", "contents"))
        choice("data.exif", self.exif, ("apply", "ignore"))
        if self.max_pixels is not None:
            positive("data.max_pixels", self.max_pixels)
        if self.pixel_range is not None and (len(self.pixel_range) != 2 or not self.pixel_range[0] < self.pixel_range[1]):
            raise ConfigError("data.pixel_range", self.pixel_range, "is not black and white, the smaller first",
                              "set data.pixel_range=[0,4095] or null")  # fmt: skip
        for key in ("mean", "std"):
            value = getattr(self, key)
            if value is not None and len(value) != self.in_chans:
                raise ConfigError(f"data.{key}", value, f"is not one number per channel ({self.in_chans})",
                                  f"set data.{key}=null for the weights' own, or ImageNet's")  # fmt: skip
            check_normalization(key, value)

    @property
    def smallest(self) -> int | None:
        """Side of the smallest training images; None = that of image_size."""
        return min(min(sides(size)) for _, size in self.sizes) if self.sizes else None

    def settled(self, known: Mapping[str, Any]) -> Self:
        """These options with what is not stated as `known` says, else as usual; what is stated wins.

        Args:
            known: of the weights that the model begins with: image_size, eval_size, crop_pct, interpolation, mean, std.
        """
        found = {key: value for key, value in {**USUAL, **known}.items() if getattr(self, key) is None}
        if self.image_size is not None:
            found.pop("eval_size", None)  # of a size that is not meant
        for key, other in (("mean", "std"), ("std", "mean")):
            if getattr(self, other) is not None:  # one of them alone goes with ImageNet's, not with somebody else's
                found.pop(key, None)
            elif key in found and len(found[key]) != self.in_chans:
                found[key] = [sum(found[key]) / len(found[key])] * self.in_chans
        return replace(self, **found) if found else self

    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(mean, std); for grey images ImageNet's are averaged over the channels."""
        mean, std = self.mean or IMAGENET_MEAN, self.std or IMAGENET_STD
        if len(mean) != self.in_chans:
            mean = [sum(mean) / len(mean)]
        if len(std) != self.in_chans:
            std = [sum(std) / len(std)]
        return tuple(mean), tuple(std)

    def made(self, train: LabelledImages, evaluation: LabelledImages, classes: Sequence[str],
             notes: Sequence[str] = (), test: LabelledImages | None = None, labels: str = "one",
             outputs: int = 0) -> Splits:  # fmt: skip
        """The splits, with what a model needs to know. `labels`, `outputs`: see DataInfo.

        Args:
            evaluation: where samples are held out, those of `train` once more, without augmentation.
        Raises:
            ConfigError: one class alone, of which nothing can be learned.
        """
        import torch

        options = self.settled({})
        size: Any = options.image_size
        if len(classes) < 2 and labels == "one" and not outputs:
            key = next(f"data.{name}" for name in ("root", "path") if hasattr(self, name))
            raise ConfigError(key, getattr(self, key[5:]), f"has the one class {', '.join(classes) or '(none)'} alone, and "
                              "nothing can be told apart", "add samples of a second class")  # fmt: skip

        mean, std = self.normalization()
        shape = (self.in_chans, *sides(size))
        evaluated: Any = tuple(self.eval_size) if isinstance(self.eval_size, list) else self.eval_size
        info = DataInfo(str(getattr(self, "name", "images")), shape, len(classes), mean, std, tuple(classes),
                        evaluated, options.crop_pct, options.interpolation, tuple(notes), labels, outputs)  # fmt: skip

        train.stages = [(begin, side) for begin, side in self.sizes or []]
        for dataset in (evaluation, test):
            if dataset is not None:
                dataset.show(self.eval_size or size)

        def split(dataset: LabelledImages, rows: Any = None) -> Split:
            found = dataset.labels if rows is None else dataset.labels[rows]
            return Split(
                dataset if rows is None else SomeSamples(dataset, rows), targets=lambda: torch.from_numpy(found), info=info
            )

        kept = [None if dataset is None else named(dataset.labels) for dataset in (train, evaluation, test)]
        if self.holds_out:
            there = slice(None) if kept[0] is None else kept[0]
            kept[:2] = self.parted(one_of(train.labels[there]))
            if not isinstance(there, slice):
                kept[:2] = there[kept[0]], there[kept[1]]
        return Splits(split(train, kept[0]), split(evaluation, kept[1]), info, None if test is None else split(test, kept[2]))


def named(labels: Any) -> Any:
    """Which samples (rows) a class map names; None = all."""
    import numpy

    left_out = labels.ndim == 1 and labels.dtype.kind == "i" and (labels < 0).any()
    return numpy.flatnonzero(labels >= 0) if left_out else None


def check_size(key: str, size: Any) -> None:
    """Raise ConfigError unless `size` is a side, or height and width, in pixels."""
    both = size if isinstance(size, list) and len(size) == 2 else [size]
    if not all(isinstance(side, int) and not isinstance(side, bool) for side in both):
        raise ConfigError(key, size, "is neither a side in pixels nor [height, width]", f"set {key}=224 or {key}=[192,256]")
    for side in both:
        within(key, side, 1, LARGEST_SIDE)


def check_sizes(sizes: Any) -> None:
    """Raise ConfigError unless `sizes` is [[epoch, size], ...], from epoch 0 on."""
    pairs: list[Any] = sizes if isinstance(sizes, list) and sizes else [None]
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int) for pair in pairs) or (
            pairs[0][0] != 0 or any(a[0] >= b[0] for a, b in itertools.pairwise(pairs))):  # fmt: skip
        raise ConfigError("data.sizes", sizes, "is no list of epochs and sizes that begins with epoch 0",
                          "set data.sizes=[[0,128],[6,160],[12,192]] or null")  # fmt: skip
    for _, size in sizes:
        check_size("data.sizes", size)


def check_normalization(key: str, value: list[float] | None) -> None:
    """Raise ConfigError for a `mean` or `std` of pixels in 0 .. 1 that would make inputs infinite or no numbers."""
    low = 1e-6 if key == "std" else -1000
    if value is not None and not all(low <= x <= 1000 for x in value):
        raise ConfigError(f"data.{key}", value, f"is not between {low:g} and 1000 for every channel",
                          f"set data.{key} for pixels in 0 .. 1, or to null")  # fmt: skip
