"""JPEG files to training batches: samples/s on one core against timm's loader and torchvision v2, in one interleaved run.

    python benchmarks/data.py                 # 256 and 1,024 px files to 64 and 224 px crops, about two minutes
    python benchmarks/data.py --rounds 3 --files 48

Every contender reads the same files in this process (no workers), does a random resized crop and a flip, bilinear, and ends
with a normalised float32 batch (N, 3, size, size). CPU time, so that a busy machine disturbs the ratios little; the
figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy
import torch
from PIL import Image
from timm.data import create_loader
from timm.data.dataset import ImageDataset
from torchvision import datasets
from torchvision.transforms import v2

from isobatch.config import options
from isobatch.data.device import ToDevice
from isobatch.data.feed import Request
from isobatch.data.loader import WorkerSource
from isobatch.data.samples import Samples

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH = 16
CPU = torch.device("cpu")


def write_files(root: Path, side: int, count: int) -> None:
    """Pictures with the spectrum of photographs (amplitude falls as 1/frequency), quality 85."""
    for i in range(count):
        generator = numpy.random.default_rng(i)
        picture = numpy.zeros((side, side, 3))
        cells = 4
        while cells <= side:
            noise = Image.fromarray(generator.integers(0, 255, (cells, cells, 3), dtype=numpy.uint8))
            picture += (numpy.asarray(noise.resize((side, side), Image.Resampling.BICUBIC), dtype=float) - 127) / cells
            cells *= 2
        picture = picture / picture.std() * 50 + 127
        for split in ("train", "val"):
            path = root / split / f"class{i % 2}" / f"{i:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.clip(0, 255).astype(numpy.uint8)).save(path, quality=85)


def ours(root: Path, size: int) -> Callable[[], Iterator[torch.Tensor]]:
    data = options("data", {"name": "image_folder", "root": str(root), "image_size": size})
    split = data.load(options("augment", {"name": "simple"}).sample_transform(data), 0).train
    source = WorkerSource(Samples(split, 0), ToDevice(CPU, split.info, False))

    def epoch() -> Iterator[torch.Tensor]:
        requests = (Request(0, torch.arange(s, min(s + BATCH, len(split)))) for s in range(0, len(split), BATCH))
        return (inputs for inputs, _ in source.batches(requests))

    return epoch


def timms(root: Path, size: int) -> Callable[[], Iterator[torch.Tensor]]:
    loader = create_loader(ImageDataset(str(root / "train")), (3, size, size), BATCH, is_training=True, no_aug=False,
                           hflip=0.5, color_jitter=None, interpolation="bilinear", num_workers=0, use_prefetcher=False,
                           mean=MEAN, std=STD, persistent_workers=False)  # fmt: skip
    return lambda: (inputs for inputs, _ in loader)


def torchvisions(root: Path, size: int) -> Callable[[], Iterator[torch.Tensor]]:
    transform = v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage(),
                            v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])  # fmt: skip
    loader = torch.utils.data.DataLoader(datasets.ImageFolder(str(root / "train"), transform), BATCH, shuffle=True)
    return lambda: (inputs for inputs, _ in loader)


CONTENDERS = {"isobatch": ours, "timm": timms, "torchvision v2": torchvisions}


def measure(root: Path, size: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds per sample of each contender and round; the contenders take turns within a round."""
    epochs = {name: make(root, size) for name, make in CONTENDERS.items()}
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for round_ in range(rounds + 1):
        for name, epoch in epochs.items():
            samples, start = 0, time.process_time()
            for inputs in epoch():
                assert inputs.shape[1:] == (3, size, size) and inputs.dtype == torch.float32
                samples += len(inputs)
            if round_:  # the first one warms up
                found[name].append((time.process_time() - start) / samples)
    return found


def rows(sides: Sequence[int] = (256, 1024), sizes: Sequence[int] = (64, 224), rounds: int = 3,
         files: int = 32) -> Iterator[tuple[str, str, str]]:  # fmt: skip
    """(what, figure, compared with)."""
    for side in sides:
        with tempfile.TemporaryDirectory() as folder:
            write_files(Path(folder), side, files)
            for size in sizes:
                found = measure(Path(folder), size, rounds)
                for name in list(CONTENDERS)[1:]:
                    ratio = statistics.median(b / a for a, b in zip(found["isobatch"], found[name], strict=True))
                    yield f"JPEGs of {side} px to {size} px, one core: speed", f"{ratio:.2f} x", f"{name}'s loader"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--files", type=int, default=64)
    parser.add_argument("--sides", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 224])
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'files':>6} {'crop':>5}  " + "  ".join(f"{name:>16}" for name in CONTENDERS) + "   to timm  to torchvision v2")
    for side in given.sides:
        with tempfile.TemporaryDirectory() as folder:
            write_files(Path(folder), side, given.files)
            for size in given.sizes:
                found = measure(Path(folder), size, given.rounds)
                rates = "  ".join(f"{1 / statistics.median(times):>12.0f} s/s" for times in found.values())
                ratios = [statistics.median(b / a for a, b in zip(found["isobatch"], found[name], strict=True))
                          for name in ("timm", "torchvision v2")]  # fmt: skip
                print(f"{side:>6} {size:>5}  {rates}   {ratios[0]:>6.2f}x  {ratios[1]:>15.2f}x", flush=True)


if __name__ == "__main__":
    main()
