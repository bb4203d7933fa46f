"""From an image file to the pixels of one crop, decoding no more than the crop needs.

A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size for a fraction of the cost (libjpeg scales in the DCT domain), so the
crop is chosen from the header's size first, and the largest reduction is taken that leaves the crop at least as large as
wanted. Pixels stay uint8, rows of interleaved channels, until the batch is on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING

import numpy
import torch
from PIL import Image

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[int, int, int, int]  # left, top, width, height
MODES = {1: "L", 3: "RGB"}


def read_image(path: str, choose: Callable[[int, int], Box], size: int, interpolation: str, channels: int = 3,
               reduced: bool = True) -> Tensor:  # fmt: skip
    """One crop of a file; see `decode_crop`."""
    with open(path, "rb", buffering=0) as file:
        return decode_crop(file.read(), choose, size, interpolation, channels, reduced)


def decode_crop(data: bytes, choose: Callable[[int, int], Box], size: int, interpolation: str, channels: int = 3,
                reduced: bool = True) -> Tensor:  # fmt: skip
    """One crop of an image, resized to size x size: (channels, size, size) uint8, a view of rows of interleaved channels.

    Args:
        data: the image as a file holds it.
        choose: (width, height) of the image -> the box to cut out.
        interpolation: bilinear or bicubic, both with antialiasing.
        reduced: allow decoding at a reduced scale.
    Raises:
        OSError and others that PIL raises for what it cannot decode.
    """
    image: Image.Image = Image.open(BytesIO(data))
    width, height = image.size
    box = choose(width, height)
    if reduced and image.format == "JPEG":
        scale = min(8, min(box[2:]) // size)
        if scale >= 2:
            image.draft(MODES[channels], (width // scale, height // scale))
    if image.mode != MODES[channels]:
        image = image.convert(MODES[channels])
    box = scaled(box, (width, height), image.size)
    left, top, box_width, box_height = box
    if box != (0, 0, *image.size):
        image = image.crop((left, top, left + box_width, top + box_height))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)  # a copy less than numpy.array makes
    row = box_width * channels  # one view instead of three: with small crops each costs as much as the flip
    pixels = pixels.as_strided((1, channels, box_height, box_width), (box_height * row, 1, row, channels))
    return resize(pixels, size, interpolation)[0]


def scaled(box: Box, full: tuple[int, int], reduced: tuple[int, int]) -> Box:
    """`box` of an image of size `full`, in an image of size `reduced` that shows the same (whole pixels, none empty)."""
    if full == reduced:
        return box
    found = []
    for start, extent, before, now in zip(box[:2], box[2:], full, reduced, strict=True):
        begin = min(round(start * now / before), now - 1)
        end = max(begin + 1, min(round((start + extent) * now / before), now))
        found.append((begin, end - begin))
    (left, width), (top, height) = found
    return left, top, width, height


def resize(pixels: Tensor, size: int, interpolation: str) -> Tensor:
    """([N,] C, H, W) of any dtype -> ([N,] C, size, size), antialiased. On uint8 it differs from PIL's by a rounding."""
    if pixels.shape[-2:] == (size, size):
        return pixels
    if pixels.ndim == 3:
        return resize(pixels.unsqueeze(0), size, interpolation)[0]
    return torch.nn.functional.interpolate(pixels, (size, size), mode=interpolation, antialias=True)


def center_box(crop_pct: float) -> Callable[[int, int], Box]:
    """The evaluation crop: the centered square of `crop_pct` of the shorter side."""

    def choose(width: int, height: int) -> Box:
        side = max(1, round(min(width, height) * crop_pct))
        return (width - side) // 2, (height - side) // 2, side, side

    return choose


def as_pixels(image: object) -> Tensor:
    """A PIL image or an array of rows (H, W[, C]) -> (C, H, W) uint8; a tensor is taken to be (C, H, W) already."""
    if isinstance(image, torch.Tensor):
        return image
    array = torch.from_numpy(numpy.array(image))
    return array.unsqueeze(0) if array.ndim == 2 else array.permute(2, 0, 1)
