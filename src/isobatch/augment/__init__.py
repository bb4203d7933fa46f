"""Group `augment`: per-sample transforms and batch mixing. Every draw is bound to the sample or the shard by its seed.

Order within a sample: crop, flip, color jitter, policy, random erasing. Mixing (mixup, cutmix) runs on the device, within a
shard, so that it is the same on every hardware plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.checks import choice, within
from isobatch.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from isobatch.augment.sample import SampleTransform
    from isobatch.data import DataInfo

CROPS = ("auto", "resized", "pad", "none")


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
        padding: pixels of a pad crop; flip: chance of a horizontal flip.
        color_jitter: strength for brightness, contrast and saturation.
        erase: chance of random erasing (Zhong et al. 2017): 2 to 33 % of the area become noise.
        mixup, cutmix: alpha of the beta distribution, 0 = off; with both, cutmix in `switch` of the cases.
        mix_prob: chance that a shard is mixed; mix_mode: one mixing per shard (`batch`) or per sample (`elem`).
    """

    name: str = "simple"
    crop: str = "auto"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (0.75, 1.3333)
    padding: int = 4
    flip: float = 0.5
    color_jitter: float = 0.0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    switch: float = 0.5
    mix_prob: float = 1.0
    mix_mode: str = "batch"

    def __post_init__(self) -> None:
        choice("augment.crop", self.crop, CROPS)
        choice("augment.mix_mode", self.mix_mode, ("batch", "elem"))
        for key in ("flip", "erase", "switch", "mix_prob"):
            within(f"augment.{key}", getattr(self, key), 0, 1)
        for key in ("padding", "color_jitter", "mixup", "cutmix"):
            within(f"augment.{key}", getattr(self, key), 0, 1000)
        for key in ("scale", "ratio"):
            low, high = getattr(self, key)
            if not 0 < low <= high or (key == "scale" and high > 1):
                raise ConfigError(f"augment.{key}", [low, high], "is no range of positive numbers",
                                  "set augment.scale=[0.08,1] or augment.ratio=[0.75,1.3333]")  # fmt: skip

    @property
    def policy_name(self) -> str:
        """timm's text for the policy; empty = none."""
        return ""

    def sample_transform(self, data: Any) -> SampleTransform | None:
        from isobatch.augment.sample import SampleTransform

        channels = getattr(data, "in_chans", None)
        if (self.policy_name or self.color_jitter) and channels not in (None, 1, 3):
            raise ConfigError("augment.name", self.name, f"works on images of 1 or 3 channels, not {channels}",
                              "set augment=simple")  # fmt: skip
        files = hasattr(data, "decode")
        mean, std = data.normalization() if files else ((0.5,), (0.25,))
        crop = ("resized" if files else "pad") if self.crop == "auto" else self.crop
        return SampleTransform(
            crop=crop, scale=self.scale, ratio=self.ratio, padding=self.padding, flip=self.flip,
            color_jitter=self.color_jitter, policy=self.policy_name, erase=self.erase, mean=mean, std=std,
            interpolation=getattr(data, "interpolation", "bilinear"), size=getattr(data, "image_size", None),
            value_range=getattr(data, "value_range", (0.0, 1.0)),
        )  # fmt: skip

    def batch_transform(self, info: DataInfo, seed: int) -> Callable[..., tuple[Tensor, Tensor]] | None:
        if not (self.mixup or self.cutmix):
            return None
        if not info.num_classes or len(info.shape) != 3:
            raise ConfigError("augment.mixup" if self.mixup else "augment.cutmix", self.mixup or self.cutmix,
                              f"mixes images with classes, and data={info.name} has none",
                              "set augment.mixup=0 augment.cutmix=0")  # fmt: skip
        from isobatch.augment.mixing import ShardMixer

        return ShardMixer(self.mixup, self.cutmix, self.switch, self.mix_prob, self.mix_mode, info.num_classes, seed)


@dataclass(frozen=True)
class Policy(Simple):
    """A policy of timm after crop and flip.

    Args:
        policy: timm's text: `rand-m9-mstd0.5-inc1` (RandAugment, Cubuk et al. 2019), `original`, `v0` (AutoAugment, Cubuk
            et al. 2018), `3a` (3-Augment, Touvron et al. 2022), `augmix-m3-w3` (Hendrycks et al. 2019).
    """

    name: str = "policy"
    policy: str = "rand-m9-mstd0.5-inc1"

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = ("rand", "augmix", "original", "originalr", "v0", "v0r", "3a")
        if self.policy.split("-")[0] not in kinds:
            raise ConfigError("augment.policy", self.policy, "timm has no such policy", f"begin it with {', '.join(kinds)}")

    @property
    def policy_name(self) -> str:
        return self.policy


TABLE: dict[str, Any] = {"none": NoAugment, "simple": Simple, "policy": Policy}
