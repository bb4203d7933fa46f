"""What augments one image. All draws come from the global generators, which are seeded for the sample beforehand.

Images are tensors (C, H, W), uint8 (0 .. 255) or float, and keep their dtype. Files ask for `box` before they are decoded, so
that only the crop is; everything else goes through `__call__`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from isobatch.checks import Size, sides
from isobatch.pixels import Box, center_box, resize


@dataclass
class SampleTransform:
    """See augment.Simple for the options.

    Args:
        size: what comes out of a resized crop; None = the image's own. smallest: side of the smallest images that there are
            (None: of size).
        mean, std: per channel (of pixels in 0 .. 1), for the noise of random erasing and the fill of a policy.
        value_range: of float images; a policy works on 256 steps of it.
    """

    crop: str = "pad"
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (0.75, 1.3333)
    padding: int = 4
    flip: float = 0.5
    vflip: float = 0.0
    color_jitter: float = 0.0
    jitter_prob: float = 1.0
    policy: str = ""
    grey: float = 0.0
    blur: float = 0.0
    erase: float = 0.0
    erase_mode: str = "pixel"
    erase_count: int = 1
    random_interpolation: bool = False
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.25,)
    interpolation: str = "bilinear"
    size: Size | None = None
    smallest: int | None = None
    value_range: tuple[float, float] = (0.0, 1.0)
    on_pil: list[Callable[[Any], Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.color_jitter:
            from torchvision.transforms import ColorJitter, RandomApply

            jitter = ColorJitter(*[self.color_jitter] * 3)
            self.on_pil.append(jitter if self.jitter_prob == 1 else RandomApply([jitter], self.jitter_prob))
        if self.policy:
            # built here, in the training process: timm is imported once, not by every worker
            self.on_pil.append(timm_policy(self.policy, min(sides(self.size or 32)), self.mean, self.interpolation))
        if self.grey:
            from torchvision.transforms import RandomGrayscale

            self.on_pil.append(RandomGrayscale(self.grey))
        if self.blur:
            from torchvision.transforms import GaussianBlur, RandomApply

            side = self.smallest or min(sides(self.size or 8))
            kernel = min(23, side - 1 + side % 2)  # timm's; smaller than the image, which is mirrored at its edges
            self.on_pil.append(RandomApply([GaussianBlur(max(3, kernel))], self.blur))

    def __call__(self, image: Tensor) -> Tensor:
        """Crop, then everything else. (C, H, W) -> (C, H, W), or of `size` after a resized crop."""
        height, width = image.shape[1:]
        if self.crop == "resized":
            left, top, box_width, box_height = self.box(width, height)
            image = image[:, top : top + box_height, left : left + box_width]
            image = resize(image, self.size or (height, width), self.way())
        return self.after(image)

    def way(self) -> str:
        """How the resized crop is interpolated."""
        return random.choice(("bilinear", "bicubic")) if self.random_interpolation else self.interpolation

    def box(self, width: int, height: int) -> Box:
        """The crop of a file: a random part (Inception's crop, as in torchvision's RandomResizedCrop), or the whole."""
        if self.crop != "resized":
            return center_box(1.0, self.size or 1)(width, height)
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = width * height * random.uniform(*self.scale)
            aspect = math.exp(random.uniform(low, high))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                return random.randint(0, width - w), random.randint(0, height - h), w, h
        w = min(width, max(1, round(height * self.ratio[1])))  # the largest centered part of an allowed aspect
        h = min(height, max(1, round(width / self.ratio[0])))
        return (width - w) // 2, (height - h) // 2, w, h

    def after(self, image: Tensor) -> Tensor:
        """Everything after what is cut out of an image or its file."""
        if self.crop == "pad":
            image = shifted(image, *self.shift())
        if random.random() < self.flip:
            image = image.flip(2)
        if self.vflip and random.random() < self.vflip:
            image = image.flip(1)
        return self.colored(image)

    def shift(self) -> tuple[int, int]:
        """Pixels down and to the right of a pad crop."""
        return random.randint(-self.padding, self.padding), random.randint(-self.padding, self.padding)

    def with_mask(self, image: Tensor, mask: Tensor, outside: int) -> tuple[Tensor, Tensor]:
        """The same for an image and what stands for each of its pixels, (height, width); `outside` comes in with a pad crop."""
        if self.crop == "pad":
            down, right = self.shift()
            image, mask = shifted(image, down, right), shifted(mask.unsqueeze(0), down, right, outside).squeeze(0)
        if random.random() < self.flip:
            image, mask = image.flip(2), mask.flip(1)
        if self.vflip and random.random() < self.vflip:
            image, mask = image.flip(1), mask.flip(0)
        return self.colored(image), mask

    def colored(self, image: Tensor) -> Tensor:
        """What moves no pixel, but for a policy's own."""
        if self.on_pil:
            image = self._through_pil(image)
        if self.erase and random.random() < self.erase:
            image = self._erased(image)
        return image

    def _through_pil(self, image: Tensor) -> Tensor:
        """The transforms that need PIL; grey images pass as RGB, floats as 256 steps of their range."""
        from PIL import Image

        low, high = self.value_range
        pixels = image
        if image.dtype != torch.uint8:
            pixels = ((image - low) * (255 / (high - low))).round_().clamp_(0, 255).to(torch.uint8)
        rows = pixels.permute(1, 2, 0).contiguous().numpy()
        picture = Image.fromarray(rows[:, :, 0]).convert("RGB") if len(image) == 1 else Image.fromarray(rows)
        for transform in self.on_pil:
            picture = transform(picture)
        if len(image) == 1:
            picture = picture.convert("L")
        changed = torch.from_numpy(numpy.array(picture)).view(*rows.shape).permute(2, 0, 1)
        return changed if image.dtype == torch.uint8 else changed.float().mul_((high - low) / 255).add_(low)

    def _erased(self, image: Tensor) -> Tensor:
        """What timm's random erasing does, before normalisation: boxes of noise or of one colour."""
        height, width = image.shape[1:]
        image = image.clone()
        for _ in range(self.erase_count):
            for _ in range(10):
                area = height * width * random.uniform(0.02, 1 / 3) / self.erase_count
                aspect = math.exp(random.uniform(math.log(0.3), math.log(1 / 0.3)))
                h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
                if 0 < h < height and 0 < w < width:
                    top, left = random.randint(0, height - h), random.randint(0, width - w)
                    image[:, top : top + h, left : left + w] = self._filling(image, h, w)
                    break
        return image

    def _filling(self, image: Tensor, height: int, width: int) -> Tensor:
        """What comes into an erased box of `image`: (channels, height, width), or one that broadcasts to it."""
        channels = len(image)
        mean, std = (torch.tensor(v).view(-1, 1, 1).expand(channels, 1, 1) for v in (self.mean, self.std))
        filling = mean
        if self.erase_mode != "const":
            filling = torch.randn(channels, *((height, width) if self.erase_mode == "pixel" else (1, 1))) * std + mean
        low, high = (0.0, 255.0) if image.dtype == torch.uint8 else self.value_range
        filling = filling * (high - low) + low
        if image.dtype == torch.uint8:
            filling = filling.round_().clamp_(0, 255)
        return filling.to(image.dtype)


def shifted(image: Tensor, down: int, right: int, outside: int = 0) -> Tensor:
    """The image moved by so many pixels; what comes in is `outside` (a pad crop). Same shape."""
    height, width = image.shape[1:]
    moved = torch.full_like(image, outside)
    rows, columns = max(0, height - abs(down)), max(0, width - abs(right))
    y, x = max(0, down), max(0, right)
    moved[:, y : y + rows, x : x + columns] = image[:, y - down : y - down + rows, x - right : x - right + columns]
    return moved


def timm_policy(policy: str, size: int, mean: tuple[float, ...], interpolation: str) -> Callable[[Any], Any]:
    """timm's RandAugment, AutoAugment or AugMix over PIL images, set up as timm's own training transform does."""
    from isobatch.runtime.timm_import import timm  # the data is made before the model

    auto_augment, str_to_pil_interp = timm.data.auto_augment, timm.data.transforms.str_to_pil_interp
    fill = tuple(min(255, round(255 * x)) for x in (mean if len(mean) == 3 else mean[:1] * 3))
    for name in ("Posterize", "PosterizeIncreasing", "PosterizeOriginal"):
        auto_augment.NAME_TO_OP[name] = posterize
    options = {"translate_const": int(size * 0.45), "img_mean": fill, "interpolation": str_to_pil_interp(interpolation)}
    if policy.startswith("rand"):
        return auto_augment.rand_augment_transform(policy, options)  # type: ignore[no-any-return]
    if policy.startswith("augmix"):
        return auto_augment.augment_and_mix_transform(policy, {**options, "translate_pct": 0.3})  # type: ignore[no-any-return]
    return auto_augment.auto_augment_transform(policy, options)  # type: ignore[no-any-return]


def posterize(image: Any, bits: int, **_: Any) -> Any:
    """The PIL image with so many bits per channel; none left is black. The strongest magnitudes of timm's policies ask for 0
    bits, which older Pillows made black and Pillow 13 refuses: a training would stop at the first such sample.
    """
    from PIL import Image, ImageOps

    if bits < 1:
        return Image.new(image.mode, image.size)
    return image if bits >= 8 else ImageOps.posterize(image, bits)
