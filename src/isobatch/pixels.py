"""From an image file to the pixels of one crop, decoding no more than the crop needs.

A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size for a fraction of the cost (libjpeg scales in the DCT domain), so the
crop is chosen from the header's size first, and the largest reduction is taken that leaves the crop at least as large as
wanted. Pixels stay uint8, rows of interleaved channels, until the batch is on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from PIL import Image

from isobatch.checks import Size, sides

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[int, int, int, int]  # left, top, width, height
MODES = {1: "L", 3: "RGB"}
MOST_PIXELS = 178_956_970  # where Pillow takes a file for an attack on the memory
DEEP_FROM, DEEP_TO = "I;16", ("I", "F")  # modes of more than 8 bits: `I;16` in any byte order, 32-bit integers, floats
ORIENTATION = 0x0112  # the tag of EXIF; its value -> how the stored image becomes upright
UPRIGHT = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
           5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
           8: Image.Transpose.ROTATE_90}  # fmt: skip


class Decoding(NamedTuple):
    """How files become pixels.

    Args:
        channels: 3 (RGB) or 1 (grey).
        reduced: allow decoding JPEGs at a reduced scale.
        upright: turn photos as their EXIF orientation says.
        black, white: of files with more than 8 bits a channel; None = the file's own range (16 bits: 0 and 65535, floats: 0 and
            1; 32-bit integers have none).
        most: pixels of a file that is decoded at all.
    """

    channels: int = 3
    reduced: bool = True
    upright: bool = True
    black: float | None = None
    white: float | None = None
    most: int = MOST_PIXELS


PLAIN = Decoding()


class _Decoder:
    """Around PIL's work: whatever it raises for a file becomes an OSError, but for memory that ran out.

    PIL's own limit on pixels is a warning, then an error that is no OSError; `Decoding.most` takes its place meanwhile.
    """

    def __enter__(self) -> None:
        self.limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        Image.MAX_IMAGE_PIXELS = self.limit
        if isinstance(error, Exception) and not isinstance(error, OSError | MemoryError):
            raise OSError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error


def read_image(path: str, choose: Callable[[int, int], Box], size: Size, interpolation: str,
               how: Decoding = PLAIN) -> Tensor:  # fmt: skip
    """One crop of a file; see `decode_crop`."""
    with open(path, "rb", buffering=0) as file:
        return decode_crop(file.read(), choose, size, interpolation, how)


def decode_crop(data: bytes, choose: Callable[[int, int], Box], size: Size, interpolation: str,
                how: Decoding = PLAIN) -> Tensor:  # fmt: skip
    """One crop of an image, resized to `size`: (channels, height, width) uint8, a view of rows of interleaved channels.

    Args:
        data: the image as a file holds it.
        choose: (width, height) of the upright image -> the box to cut out.
        interpolation: bilinear or bicubic, both with antialiasing.
    Raises:
        OSError: it cannot be decoded, or is larger than `how.most`.
    """
    with _Decoder():
        image: Image.Image = Image.open(BytesIO(data))
        stored = image.size
        if stored[0] * stored[1] > how.most:
            raise OSError(f"it has {stored[0]} x {stored[1]} pixels, more than data.max_pixels={how.most}")
        turn = orientation(image) if how.upright else 1
    box = stored_box(choose(*(stored if turn < 5 else stored[::-1])), stored, turn)
    with _Decoder():
        if how.reduced and image.format == "JPEG":
            wanted = sides(size) if turn < 5 else sides(size)[::-1]  # of the image as it is stored
            scale = min(8, box[2] // wanted[1], box[3] // wanted[0])
            if scale >= 2:
                image.draft(MODES[how.channels], (stored[0] // scale, stored[1] // scale))
        left, top, width, height = scaled(box, stored, image.size)
        if (left, top, width, height) != (0, 0, *image.size):
            image = image.crop((left, top, left + width, top + height))
        image = in_bytes(image, how)
        if turn in UPRIGHT:
            image = image.transpose(UPRIGHT[turn])
        rows = bytearray(image.tobytes())
    width, height = image.size
    channels = how.channels
    pixels = torch.frombuffer(rows, dtype=torch.uint8)  # a copy less than numpy.array makes
    row = width * channels  # one view instead of three: with small crops each costs as much as the flip
    pixels = pixels.as_strided((1, channels, height, width), (height * row, 1, row, channels))
    return resize(pixels, size, interpolation)[0]


def in_bytes(image: Image.Image, how: Decoding) -> Image.Image:
    """`image` in the mode of `how.channels`; what has more than 8 bits is scaled, where PIL would make all above 255 white."""
    mode, kind = MODES[how.channels], image.mode
    if kind.startswith(DEEP_FROM) or kind in DEEP_TO:
        image = Image.fromarray(in_range(numpy.asarray(image), how, kind, image.format))
    if image.mode == "LAB":
        image = image.convert("RGB")  # PIL knows no other way
    return image if image.mode == mode else image.convert(mode)


def in_range(values: Any, how: Decoding, kind: str = "", written: str | None = None) -> Any:
    """An array of any numbers as uint8, black 0 and white 255.

    Raises:
        OSError: 32-bit integers, whose black and white are nowhere said.
    """
    black, white = how.black, how.white
    if black is None or white is None:
        black, white = 0.0, 1.0
        if values.dtype.kind in "iu":
            # older Pillows read a PNG of 16 bits as 32-bit integers
            white = 65535.0 if values.dtype.itemsize == 2 or written == "PNG" else 0.0
        if not white:
            raise OSError("it holds 32-bit integers, and nothing says which of them are black and white: set data.pixel_range")
    scaled_values = (values.astype("float32") - black) * (255.0 / (white - black))
    return numpy.nan_to_num(scaled_values, nan=0.0).round().clip(0, 255).astype("uint8")


def orientation(image: Image.Image) -> int:
    """1 .. 8 as EXIF has it; 1 (upright) where nothing sound is said, and for TIFF, which PIL turns upright by itself."""
    if image.format == "TIFF" or not ("exif" in image.info or "xmp" in image.info):
        return 1
    try:
        found = image.getexif().get(ORIENTATION, 1)
    except Exception:  # PIL raises of every kind; a photo whose notes are damaged is a photo
        return 1
    return found if found in UPRIGHT else 1


def stored_box(box: Box, stored: tuple[int, int], turn: int) -> Box:
    """`box` of the upright image, in the image of size `stored` (width, height) that EXIF orientation `turn` makes upright."""
    left, top, width, height = box
    if turn >= 5:
        left, top, width, height = top, left, height, width
    if turn in (2, 3, 7, 8):
        left = stored[0] - left - width
    if turn in (3, 4, 6, 7):
        top = stored[1] - top - height
    return left, top, width, height


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


def resize(pixels: Tensor, size: Size, interpolation: str) -> Tensor:
    """([N,] C, H, W) of any dtype -> ([N,] C, height, width), antialiased. On uint8 it differs from PIL's by a rounding."""
    if pixels.shape[-2:] == sides(size):
        return pixels
    if pixels.ndim == 3:
        return resize(pixels.unsqueeze(0), size, interpolation)[0]
    return torch.nn.functional.interpolate(pixels, sides(size), mode=interpolation, antialias=True)


def center_box(crop_pct: float, size: Size = 1) -> Callable[[int, int], Box]:
    """The evaluation crop: the largest centered part of the aspect of `size`, times `crop_pct` (for a square: of the shorter
    side)."""
    tall, wide = sides(size)

    def choose(width: int, height: int) -> Box:
        if tall == wide:
            w = h = max(1, round(min(width, height) * crop_pct))
        else:
            scale = min(width / wide, height / tall) * crop_pct
            w, h = max(1, round(wide * scale)), max(1, round(tall * scale))
        return (width - w) // 2, (height - h) // 2, w, h

    return choose


def as_pixels(image: Any, channels: int | None = None) -> Tensor:
    """A PIL image of any mode or an array of rows (H, W[, C]) -> (C, H, W) uint8; a tensor is taken to be (C, H, W) already.

    Args:
        channels: 3 = RGB, 1 = grey; else grey where the PIL image has no colours, and RGB where it has.
    """
    if isinstance(image, torch.Tensor):
        return image
    if hasattr(image, "getbands"):  # of PIL
        grey = image.mode in ("1", "L", "LA", "La", *DEEP_TO) or image.mode.startswith(DEEP_FROM)
        image = in_bytes(image, Decoding(channels if channels in MODES else 1 if grey else 3))
    array = numpy.array(image)
    if array.dtype == numpy.uint16:
        array = in_range(array, PLAIN)
    pixels = torch.from_numpy(array)
    return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1)
