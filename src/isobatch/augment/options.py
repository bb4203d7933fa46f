"""Group `augment`: per-sample transforms and batch mixing. Every draw is bound to the sample or the shard by its seed.

Order within a sample: crop, flips, color jitter, policy, grey, blur, random erasing. Mixing (mixup, cutmix) runs on
the device, within a shard, so that it is the same on every hardware plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch import amounts
from isobatch.checks import choice, within
from isobatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from isobatch.augment.sample import SampleTransform
    from isobatch.data import DataInfo

CROPS = ("auto", "resized", "pad", "none")
ERASURES = ("pixel", "rand", "const")
FRACTIONS = ("p", "mstd", "a")  # parts of timm's policies that may have a point
TRANSFORM_SETS = ("tweights", "t3a", "t3aw")  # of RandAugment


@dataclass(frozen=True)
class NoAugment:
    """Nothing: training images are read as evaluation images are."""

    name: str = "none"

    def sample_transform(self, data: Any) -> SampleTransform | None:
        """What augments one sample of `data` (the options of group data); None = nothing."""
        return None

    def batch_transform(self, info: DataInfo, seed: int) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """What mixes a micro batch on the device; None = nothing. See Feed.prepare."""
        return None


@dataclass(frozen=True)
class Simple(NoAugment):
    """
    Args:
        crop: `resized` (a random part of the image, resized), `pad` (shifted by up to `padding` pixels, black outside),
            `none`; auto = resized for image files, pad for images in memory.
        scale, ratio: area (share of the image) and aspect ratio of a resized crop.
        random_interpolation: draw bilinear or bicubic for each resized crop, whatever data.interpolation says.
        padding: pixels of a pad crop; flip, vflip: chance of a horizontal and a vertical flip.
        color_jitter: strength for brightness, contrast and saturation; jitter_prob: chance that it is applied at all.
        grey, blur: chance that all colour is taken out, and of a Gaussian blur (sigma 0.1 to 2 pixels).
        erase: chance of random erasing (Zhong et al. 2017): 2 to 33 % of the area, in `erase_count` boxes, become noise
            (erase_mode `pixel`), one random colour a box (`rand`) or the data's mean colour (`const`).
        mixup, cutmix: alpha of the beta distribution, 0 = off; with both, cutmix in `switch` of the cases.
        mix_prob: chance that a shard is mixed; mix_mode: one mixing per shard (`batch`), per sample (`elem`) or per pair of
            samples (`pair`).
        cutmix_sides: least and largest side of what cutmix pastes, as a share of the image's, instead of what `cutmix` draws.
        mix_until: length of the run after which nothing is mixed any more; null = mixed to the end.
    """

    amounts: ClassVar[tuple[str, ...]] = ("mix_until",)

    name: str = "simple"
    crop: str = "auto"
    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    ratio: list[float] = field(default_factory=lambda: [0.75, 1.3333])
    random_interpolation: bool = False
    padding: int = 4
    flip: float = 0.5
    vflip: float = 0.0
    color_jitter: float = 0.0
    jitter_prob: float = 1.0
    grey: float = 0.0
    blur: float = 0.0
    erase: float = 0.0
    erase_mode: str = "pixel"
    erase_count: int = 1
    mixup: float = 0.0
    cutmix: float = 0.0
    switch: float = 0.5
    mix_prob: float = 1.0
    mix_mode: str = "batch"
    cutmix_sides: list[float] | None = None
    mix_until: Any = None

    def __post_init__(self) -> None:
        choice("augment.crop", self.crop, CROPS)
        choice("augment.mix_mode", self.mix_mode, ("batch", "elem", "pair"))
        choice("augment.erase_mode", self.erase_mode, ERASURES)
        within("augment.erase_count", self.erase_count, 1, 100)
        amounts.read(self, "augment")
        for key, without, of in (
            ("jitter_prob", 1.0, "color_jitter"),
            ("erase_mode", "pixel", "erase"),
            ("erase_count", 1, "erase"),
            ("cutmix_sides", None, "cutmix"),
        ):
            if getattr(self, key) != without and not getattr(self, of):
                raise ConfigError(f"augment.{key}", getattr(self, key), f"says nothing with augment.{of}=0",
                                  f"set augment.{of} above 0, or leave augment.{key} out")  # fmt: skip
        for key in ("flip", "vflip", "jitter_prob", "grey", "blur", "erase", "switch", "mix_prob"):
            within(f"augment.{key}", getattr(self, key), 0, 1)
        for key in ("padding", "color_jitter", "mixup", "cutmix"):
            within(f"augment.{key}", getattr(self, key), 0, 1000)
        for key, most, example in (
            ("scale", 1, "[0.08,1]"),
            ("ratio", 1000, "[0.75,1.3333]"),
            ("cutmix_sides", 1, "[0.2,0.8]"),
        ):
            pair = getattr(self, key)
            if pair is not None and (len(pair) != 2 or not 0 < pair[0] <= pair[1] <= most):
                raise ConfigError(f"augment.{key}", pair, "is no range of positive numbers", f"set augment.{key}={example}")

    @property
    def policy_name(self) -> str:
        """timm's text for the policy; empty = none."""
        return ""

    def sample_transform(self, data: Any) -> SampleTransform | None:
        from isobatch.augment.sample import SampleTransform

        channels = getattr(data, "in_chans", None)
        if (self.policy_name or self.color_jitter or self.grey or self.blur) and channels not in (None, 1, 3):
            raise ConfigError("augment.name", self.name, f"works on images of 1 or 3 channels, not {channels}",
                              "set augment=simple")  # fmt: skip
        files = hasattr(data, "decode")
        data = data.settled({}) if files else data
        mean, std = data.normalization() if files else ((0.5,), (0.25,))
        crop = ("resized" if files else "pad") if self.crop == "auto" else self.crop
        if self.random_interpolation and crop != "resized":
            raise ConfigError("augment.random_interpolation", True, f"is of a resized crop, and this one is {crop}",
                              "set augment.crop=resized, or augment.random_interpolation=false")  # fmt: skip
        return SampleTransform(
            crop=crop, scale=(self.scale[0], self.scale[1]), ratio=(self.ratio[0], self.ratio[1]),
            padding=self.padding, flip=self.flip, vflip=self.vflip, color_jitter=self.color_jitter,
            jitter_prob=self.jitter_prob, policy=self.policy_name, grey=self.grey, blur=self.blur,
            erase=self.erase, erase_mode=self.erase_mode, erase_count=self.erase_count,
            random_interpolation=self.random_interpolation, mean=mean, std=std,
            interpolation=getattr(data, "interpolation", "bilinear"), size=getattr(data, "image_size", None),
            smallest=getattr(data, "smallest", None), value_range=getattr(data, "value_range", (0.0, 1.0)),
        )  # fmt: skip

    def batch_transform(self, info: DataInfo, seed: int) -> Callable[..., tuple[Tensor, Tensor]] | None:
        if not (self.mixup or self.cutmix):
            if self.mix_until is not None:
                raise ConfigError("augment.mix_until", self.mix_until, "ends a mixing, and nothing is mixed",
                                  "set augment.mixup or augment.cutmix above 0, or augment.mix_until=null")  # fmt: skip
            return None
        if not info.num_classes or info.labels != "one" or len(info.shape) != 3:
            raise ConfigError("augment.mixup" if self.mixup else "augment.cutmix", self.mixup or self.cutmix,
                              f"mixes images with classes, one each, and data={info.name} has none",
                              "set augment.mixup=0 augment.cutmix=0")  # fmt: skip
        from isobatch.augment.mixing import ShardMixer

        # still a share or in epochs where a micro batch is only tried
        until = self.mix_until if isinstance(self.mix_until, int) else None
        return ShardMixer(
            self.mixup, self.cutmix, self.switch, self.mix_prob, self.mix_mode, info.num_classes, seed, until, self.cutmix_sides
        )


@dataclass(frozen=True)
class RandAugment(Simple):
    """RandAugment (Cubuk et al. 2019) by timm, after crop and flip.

    Args:
        policy: timm's text: `rand-m9-mstd0.5-inc1` = magnitude 9, its deviation 0.5, increasing severity; n = operations.
    """

    name: str = "randaugment"
    policy: str = "rand-m9-mstd0.5-inc1"
    kinds: ClassVar[tuple[str, ...]] = ("rand",)
    parts: ClassVar[dict[str, tuple[float, float]]] = {"m": (0, 100), "n": (1, 100), "p": (0, 1), "mstd": (0, 1000),
                                                       "mmax": (1, 100), "inc": (0, 1)}  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, *parts = self.policy.split("-")
        if kind not in self.kinds:
            raise ConfigError("augment.policy", self.policy, f"is no policy of {self.name}",
                              f"begin it with {' or '.join(self.kinds)}")  # fmt: skip
        for part in parts:
            self.check_part(part)

    def check_part(self, part: str) -> None:
        """Raise ConfigError for what timm would leave out without a word, stop at with an assertion, or never be done with."""
        if "n" in self.parts and part in TRANSFORM_SETS:
            return
        match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", part)
        if match is None or match[1] not in self.parts or ("." in match[2] and match[1] not in FRACTIONS):
            names = ", ".join(f"{name}<{'number' if name in FRACTIONS else 'integer'}>" for name in self.parts)
            raise ConfigError("augment.policy", self.policy, f"has the part {part!r}, which says nothing",
                              f"parts of {self.name} are {names}, with a dash between them")  # fmt: skip
        low, high = self.parts[match[1]]
        if not low <= float(match[2]) <= high:
            raise ConfigError("augment.policy", self.policy, f"{match[1]} is not between {low:g} and {high:g}",
                              f"set {match[1]} into that range")  # fmt: skip

    @property
    def policy_name(self) -> str:
        return self.policy


@dataclass(frozen=True)
class AutoAugment(RandAugment):
    """AutoAugment (Cubuk et al. 2018) by timm: `original`, `v0` and their `r` forms; `3a` is 3-Augment (Touvron 2022)."""

    name: str = "autoaugment"
    policy: str = "original-mstd0.5"
    kinds: ClassVar[tuple[str, ...]] = ("original", "originalr", "v0", "v0r", "3a")
    parts: ClassVar[dict[str, tuple[float, float]]] = {"mstd": (0, 1000)}


@dataclass(frozen=True)
class AugMix(RandAugment):
    """AugMix (Hendrycks et al. 2019) by timm, without its consistency loss: m = magnitude, w = chains."""

    name: str = "augmix"
    policy: str = "augmix-m3-w3"
    kinds: ClassVar[tuple[str, ...]] = ("augmix",)
    parts: ClassVar[dict[str, tuple[float, float]]] = {"m": (0, 100), "w": (1, 100), "d": (1, 100), "a": (0.001, 1000),
                                                       "b": (0, 1), "mstd": (0, 1000)}  # fmt: skip
