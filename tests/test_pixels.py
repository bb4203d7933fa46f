"""What is in a file reaches the model: bits, palettes, orientation, size; for every data source that decodes."""

from __future__ import annotations

import io
import tarfile
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from harness import rows, train
from PIL import Image, ImageOps

import isobatch
from isobatch import pixels
from isobatch.config import options
from isobatch.data.base import Split
from isobatch.data.samples import Failure, Samples, damaged, stacked
from isobatch.errors import ConfigError
from isobatch.pixels import UPRIGHT, Decoding, as_pixels, decode_crop


def encoded(image: Any, kind: str = "PNG", **more: Any) -> bytes:
    found = io.BytesIO()
    image.save(found, kind, **more)
    return found.getvalue()


def whole(width: int, height: int) -> tuple[int, int, int, int]:
    return 0, 0, width, height


def grey16(value: int, side: int = 8) -> Image.Image:
    return Image.fromarray(numpy.full((side, side), value, "uint16"))


@pytest.mark.parametrize(("value", "level"), [(0, 0), (257, 1), (10000, 39), (40000, 156), (65535, 255)])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_to_eight(value: int, level: int, channels: int, kind: str) -> None:
    found = decode_crop(encoded(grey16(value), kind), whole, 8, "bilinear", Decoding(channels))
    assert found.shape == (channels, 8, 8) and found.unique().tolist() == [level]


def test_black_and_white_can_be_named_and_floats_have_a_range() -> None:
    twelve = decode_crop(encoded(grey16(4095)), whole, 8, "bilinear", Decoding(black=0, white=4095))
    assert twelve.unique().tolist() == [255]
    for value, level in ((0.0, 0), (0.5, 128), (1.0, 255), (7.0, 255), (float("nan"), 0)):
        image = encoded(Image.fromarray(numpy.full((8, 8), value, "float32")), "TIFF")
        assert decode_crop(image, whole, 8, "bilinear").unique().tolist() == [level]
    deep = encoded(Image.fromarray(numpy.full((8, 8), 3000, "int32")), "TIFF")
    with pytest.raises(OSError, match=r"32-bit integers.*set data\.pixel_range"):
        decode_crop(deep, whole, 8, "bilinear")
    assert decode_crop(deep, whole, 8, "bilinear", Decoding(black=1000, white=5000)).unique().tolist() == [128]
    eight = encoded(Image.new("L", (8, 8), 100))
    assert decode_crop(eight, whole, 8, "bilinear", Decoding(black=0, white=4095)).unique().tolist() == [100]


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_a_photo_is_cut_and_turned_as_pil_turns_it(turn: int, kind: str) -> None:
    """Each quarter has its own colour, so every turn shows; the crop is chosen in the upright picture."""
    image = Image.new("RGB", (48, 32))
    for i, colour in enumerate(("red", "lime", "blue", "white")):
        image.paste(colour, (24 * (i % 2), 16 * (i // 2), 24 * (i % 2) + 24, 16 * (i // 2) + 16))
    exif = Image.Exif()
    exif[pixels.ORIENTATION] = turn
    data = encoded(image, kind, exif=exif, **{"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(kind, {}))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    asked: list[tuple[int, int]] = []

    def box(width: int, height: int) -> tuple[int, int, int, int]:
        asked.append((width, height))
        return 3, 5, 20, 20

    found = decode_crop(data, box, 20, "bilinear").permute(1, 2, 0).numpy()
    assert asked == [upright.size]
    assert numpy.array_equal(found, numpy.asarray(upright.convert("RGB").crop((3, 5, 23, 25))))
    if kind == "TIFF":
        return  # PIL turns it whatever it is asked
    stored = decode_crop(data, box, 20, "bilinear", Decoding(upright=False)).permute(1, 2, 0).numpy()
    assert numpy.array_equal(stored, numpy.asarray(Image.open(io.BytesIO(data)).convert("RGB").crop((3, 5, 23, 25))))
    assert asked[1] == (48, 32) and (turn not in UPRIGHT or not numpy.array_equal(stored, found))


def test_a_reduced_jpeg_is_turned_too() -> None:
    image = Image.effect_noise((256, 128), 60).convert("RGB")
    exif = Image.Exif()
    exif[pixels.ORIENTATION] = 6
    data = encoded(image, "JPEG", quality=95, exif=exif)
    fast, full = (decode_crop(data, whole, 32, "bilinear", Decoding(reduced=r)).float() for r in (True, False))
    turned = decode_crop(data, whole, 32, "bilinear", Decoding(upright=False)).float()
    assert not fast.equal(full) and (fast - full).abs().mean() < 0.5 * (fast - turned).abs().mean()


def test_notes_that_are_damaged_damage_no_photo(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.new("RGB", (4, 4), "red")
    data = encoded(image, "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert decode_crop(data, whole, 4, "bilinear").shape == (3, 4, 4)


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def folder_of(root: Path, made: dict[str, bytes]) -> Path:
    for split in ("train", "val"):
        for name, data in made.items():
            write(root / split / name / "a.png", data)
    return root


def sources(tmp_path: Path, made: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    """The same images, a class each, as every source that reads files."""
    root = folder_of(tmp_path / "folder", made)
    for name in ("train", "val"):
        lines = ["path,label", *(f"{name}/{label}/a.png,{label}" for label in made)]
        (root / f"{name}.csv").write_text("\n".join(lines))
        with tarfile.open(root / f"{name}-0.tar", "w") as tar:
            for label, data in made.items():
                for suffix, content in (("png", data), ("cls", label.encode())):
                    entry = tarfile.TarInfo(f"{label}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
    return {name: {"name": name, "root": str(root), "image_size": 8} for name in ("image_folder", "csv", "webdataset")}


def test_every_source_of_files_reads_deep_and_turned_images(tmp_path: Path) -> None:
    half = Image.new("L", (8, 8))
    half.paste(255, (0, 0, 8, 4))  # the upper half is white
    exif = Image.Exif()
    exif[pixels.ORIENTATION] = 3
    made = {"dim": encoded(grey16(10000)), "light": encoded(grey16(40000)), "turned": encoded(half, exif=exif)}
    for name, node in sources(tmp_path, made).items():
        for channels in (1, 3):
            split = options("data", {**node, "in_chans": channels, "crop_pct": 1.0}).load(None, 0).eval
            images = [split.dataset[i][0].float() for i in range(3)]
            assert [image.unique().tolist() for image in images[:2]] == [[39.0], [156.0]], name
            assert images[2][:, :4].max() == 0 and images[2][:, 4:].min() == 255, name
        ignored = options("data", {**node, "exif": "ignore", "crop_pct": 1.0}).load(None, 0).eval.dataset[2][0]
        assert ignored[:, :4].min() == 255, name


def test_two_greys_of_sixteen_bits_are_told_apart(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "data", {"dim": encoded(grey16(10000)), "light": encoded(grey16(40000))})
    train(tmp_path / "run", "logger=none", "threads=1", "model=mlp", "model.width=8", "data=image_folder", f"data.root={root}",
          "data.image_size=8", "data.num_workers=0", "batch.effective=2", "epochs=null", "steps=20", "eval_every=20",
          "scheduler=constant", "optimizer.lr=0.02")  # fmt: skip
    assert rows(tmp_path / "run", "eval/accuracy") == [1.0]


def test_images_of_any_mode_become_what_is_asked_for() -> None:
    red = Image.new("RGB", (6, 4), (200, 0, 0))
    for mode in ("P", "RGBA", "CMYK", "HSV", "YCbCr", "LAB", "1", "L", "LA", "I;16", "I", "F"):
        image = red.convert(mode) if mode not in ("LAB", "I;16", "I", "F") else (
            Image.new("LAB", (6, 4)) if mode == "LAB" else grey16(30000) if mode in ("I;16", "I") else
            Image.fromarray(numpy.full((4, 6), 0.5, "float32")))  # fmt: skip
        for channels in (1, 3):
            found = as_pixels(image, channels)
            assert found.shape[0] == channels and found.dtype == torch.uint8, mode
        assert as_pixels(image).shape[0] == (1 if mode in ("1", "L", "LA", "I;16", "I", "F") else 3), mode
    palette = as_pixels(red.convert("P")).int()
    assert (palette[:, 0, 0] - torch.tensor([200, 0, 0])).abs().max() <= 8, "colours, not numbers of a palette"
    assert stacked([red, Image.new("L", (6, 4))], 1).shape == (2, 1, 4, 6)
    assert as_pixels(numpy.full((4, 6), 65535, "uint16")).unique().tolist() == [255]


class Painted:
    """Palette images: class 0 is red, class 1 blue; the palettes are such that the numbers in them are the same."""

    def __init__(self, split: str):
        self.classes = ["red", "blue"]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Any, int]:
        colour = (200, 0, 0) if index % 2 == 0 else (0, 0, 200)
        return Image.new("RGB", (8, 8), colour).convert("P", palette=Image.Palette.ADAPTIVE, colors=2), index % 2


def test_own_data_of_palette_images_shows_its_colours(tmp_path: Path) -> None:
    isobatch.register("data", "painted", Painted)
    for channels, shape in ((None, (3, 8, 8)), (3, (3, 8, 8)), (1, (1, 8, 8))):
        splits = options("data", {"name": "painted", "in_chans": channels}).load(None, 0)
        assert splits.info.shape == shape
        batch = Samples(splits.train, 0).isolated((0, [0, 1]))
        assert not isinstance(batch, Failure) and batch.inputs.shape == (2, *shape)
        assert not batch.inputs[0].equal(batch.inputs[1]), "both are number 0 of their palettes"
        plain = options("data", {"name": "painted", "in_chans": channels}).load(lambda image: image, 0)
        assert plain.info.shape == shape and plain.train.dataset[0][0].shape == shape


class Bomb(Exception):
    """No OSError, as PIL's own."""


def test_whatever_a_decoder_raises_is_a_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("RGB", (4, 4)))
    for error in (Bomb("boom"), KeyError("x"), IndexError(), AttributeError("y"), RecursionError()):

        def broken(*_: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(pixels.Image, "open", broken)
        with pytest.raises(OSError, match=type(error).__name__):
            decode_crop(data, whole, 4, "bilinear")
    for wrong in (MemoryError(),):
        monkeypatch.setattr(pixels.Image, "open", lambda *_, wrong=wrong: (_ for _ in ()).throw(wrong))
        with pytest.raises(MemoryError):
            decode_crop(data, whole, 4, "bilinear")


def test_a_file_of_too_many_pixels_is_damaged_and_the_limit_can_be_raised() -> None:
    large = encoded(Image.new("1", (3000, 2000)))
    with pytest.raises(OSError, match=r"it has 3000 x 2000 pixels, more than data\.max_pixels=5000000"):
        decode_crop(large, whole, 8, "bilinear", Decoding(most=5_000_000))
    before = pixels.Image.MAX_IMAGE_PIXELS
    assert decode_crop(large, whole, 8, "bilinear", Decoding(most=6_000_000)).shape == (3, 8, 8)
    assert before == pixels.Image.MAX_IMAGE_PIXELS, "of other code in this process"


def test_two_hundred_megapixels_are_replaced_and_named(tmp_path: Path) -> None:
    bomb = encoded(Image.new("1", (20000, 10000)))
    made = {"cat": encoded(Image.new("RGB", (8, 8), "red")), "dog": encoded(Image.new("RGB", (8, 8), "blue"))}
    root = folder_of(tmp_path, made)
    write(root / "train/cat/bomb.png", bomb)
    split = options("data", {"name": "image_folder", "root": str(root), "image_size": 8}).load(None, 0).train
    batch = Samples(split, 0, replaces=True).isolated((0, [0, 1, 2]))
    assert not isinstance(batch, Failure) and len(batch.replaced) == 1 and "bomb.png" in batch.replaced[0]
    assert "200" not in batch.replaced[0] or "20000 x 10000 pixels, more than data.max_pixels" in batch.replaced[0]


class OwnBombs:
    def __init__(self, error: str):
        self.error = error

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index:
            return torch.zeros(3, 2, 2), 0
        if self.error == "of the dataset":
            raise KeyError("a mistake")
        Image._decompression_bomb_check((10**6, 10**6))
        raise AssertionError("not reached")


def test_own_data_that_decodes_with_pil_is_replaced_too_but_no_mistake_is_hidden() -> None:
    batch = Samples(Split(OwnBombs("of PIL")), 0, replaces=True).isolated((0, [0]))
    assert not isinstance(batch, Failure) and "exceeds limit" in batch.replaced[0]
    found = Samples(Split(OwnBombs("of the dataset")), 0, replaces=True).isolated((0, [0]))
    assert isinstance(found, Failure) and "KeyError" in found.line
    assert not damaged(MemoryError()) and damaged(ValueError())


def test_ranges_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    for values, key in (({"pixel_range": [1.0]}, "pixel_range"), ({"pixel_range": [5.0, 5.0]}, "pixel_range"),
                        ({"exif": "rotate"}, "exif"), ({"max_pixels": 0}, "max_pixels")):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"^data\.{key}="):
            options("data", {"name": "image_folder", "root": str(tmp_path), **values})
