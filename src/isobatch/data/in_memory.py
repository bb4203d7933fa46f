"""Datasets that live in memory: digits, diabetes, random_matrix, synthetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from isobatch.checks import positive, within
from isobatch.data.base import DataInfo, Split, Splits, check_workers
from isobatch.data.held_out import HeldOut, pairs
from isobatch.marks import option

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Digits(HeldOut):
    """scikit-learn's handwritten digits: 1,797 real 8 x 8 grey images, 10 classes, in memory, no download.

    The fifth of them that is held out is drawn once from a fixed seed, the same for every `seed` of a run. With `holdout` or
    `fold`, all of them are parted.
    """

    name: str = "digits"
    num_workers: int | None = option(None, resume="free")
    kind = "images"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_workers(self.num_workers)

    def load(self, augment: Any, seed: int) -> Splits:
        import numpy
        import torch

        rows = torch.from_numpy(read_digits()[numpy.random.RandomState(0).permutation(1797)])
        images = rows[:, :-1].reshape(-1, 1, 8, 8).float().div_(16)
        labels = rows[:, -1].long()
        info = DataInfo("digits", (1, 8, 8), 10, (0.305,), (0.376,), tuple("0123456789"))
        cut = 0 if self.holds_out else len(labels) // 5
        train, evaluation, _ = pairs((images[cut:], labels[cut:]), (images[:cut], labels[:cut]), self)
        return Splits(in_memory(*train, info, augment), in_memory(*evaluation, info, None), info)


@cache  # the jobs of a sweep share a process
def read_digits() -> Any:
    """scikit-learn's digits as it ships them: a float64 array (1797, 65), 64 grey values 0 to 16 and the label; leave it so.

    Read without importing scikit-learn, which takes longer (3 s, in every rank) than importing torch.
    """
    import importlib.util
    from pathlib import Path

    import numpy

    found = importlib.util.find_spec("sklearn")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz" if found and found.origin else None
    if file is not None and file.is_file():
        return numpy.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    raw = load_digits()
    return numpy.column_stack([raw.data, raw.target])


@dataclass(frozen=True)
class Diabetes:
    """scikit-learn's diabetes: 442 real patients, ten measurements each, and a number that says how the disease went on, in
    hundreds. In memory, no download. The fifth that is held out is the same for every `seed` of a run.
    """

    name: str = "diabetes"
    num_workers: int | None = option(None, resume="free")
    kind = "vectors"

    def __post_init__(self) -> None:
        check_workers(self.num_workers)

    def load(self, augment: Any, seed: int) -> Splits:
        import numpy
        import torch
        from sklearn.datasets import load_diabetes

        inputs, targets = load_diabetes(return_X_y=True, scaled=False)
        order, cut = numpy.random.RandomState(0).permutation(len(inputs)), len(inputs) // 5
        rows = torch.from_numpy(inputs[order]).float()
        rows = (rows - rows[cut:].mean(0)) / rows[cut:].std(0)
        numbers = torch.from_numpy(targets[order] / 100).float().unsqueeze(1)
        info = DataInfo("diabetes", (10,), outputs=1)
        return Splits(in_memory(rows[cut:], numbers[cut:], info, None), in_memory(rows[:cut], numbers[:cut], info, None), info)


MOST_ROWS = 2**15  # 4 GB of matrix


@dataclass(frozen=True)
class RandomMatrix:
    """A seeded `size` x `size` uniform matrix whose rows are the samples (the toy of gradient-accumulation articles).

    The matrix comes from `matrix_seed`, not from the run's seed. Row i has target i, evaluation reads the same rows.
    """

    name: str = "random_matrix"
    size: int = 16
    matrix_seed: int = 0
    num_workers: int | None = option(None, resume="free")
    kind = "vectors"

    def __post_init__(self) -> None:
        check_workers(self.num_workers)
        within("data.size", self.size, 1, MOST_ROWS)
        within("data.matrix_seed", self.matrix_seed, 0, 2**63 - 1)

    def load(self, augment: Any, seed: int) -> Splits:
        import torch

        rows = torch.rand(self.size, self.size, generator=torch.Generator().manual_seed(self.matrix_seed))
        targets = torch.arange(self.size, dtype=torch.float32).unsqueeze(1)
        split = in_memory(rows, targets, DataInfo("random_matrix", (self.size,)), None)
        return Splits(split, split, DataInfo("random_matrix", (self.size,)))


@dataclass(frozen=True)
class Synthetic:
    """Random images and labels of any size and count, in memory: for speed, memory and plumbing, not for accuracy.

    Every class has a pattern that its images share with strength `signal`, so that there is something to learn.
    """

    name: str = "synthetic"
    samples: int = 512
    eval_samples: int = 128
    image_size: int = 32
    in_chans: int = 3
    num_classes: int = 10
    signal: float = 0.5
    num_workers: int | None = option(None, resume="free")
    kind = "images"
    value_range = (-4.0, 4.0)  # what a policy of group augment takes for black and white

    def __post_init__(self) -> None:
        check_workers(self.num_workers)
        for key in ("samples", "eval_samples", "image_size", "in_chans", "num_classes"):
            positive(f"data.{key}", getattr(self, key))
        within("data.signal", self.signal, 0, 1e6)

    def load(self, augment: Any, seed: int) -> Splits:
        import torch

        generator = torch.Generator().manual_seed(seed)
        shape = (self.in_chans, self.image_size, self.image_size)
        patterns = torch.randn(self.num_classes, *shape, generator=generator)
        info = DataInfo("synthetic", shape, self.num_classes, (0.0,) * self.in_chans, (1.0,) * self.in_chans,
                        tuple(str(c) for c in range(self.num_classes)))  # fmt: skip

        def split(n: int, transform: Any) -> Split:
            labels = torch.randint(0, self.num_classes, (n,), generator=generator)
            images = torch.randn(n, *shape, generator=generator).add_(patterns[labels], alpha=self.signal)
            return in_memory(images, labels, info, transform)

        return Splits(split(self.samples, augment), split(self.eval_samples, None), info)


class Normalized:
    """A dataset over tensors for per-sample transforms: (image in 0..1 -> transform -> normalised, target)."""

    def __init__(self, images: Tensor, targets: Tensor, info: DataInfo, transform: Any):
        import torch

        self.images, self.targets, self.transform = images, targets, transform
        self.mean = torch.tensor(info.mean).view(-1, 1, 1)
        self.std = torch.tensor(info.std).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return (self.transform(self.images[index]) - self.mean) / self.std, self.targets[index]


def in_memory(inputs: Tensor, targets: Tensor, info: DataInfo, transform: Any) -> Split:
    """A split over tensors; without a per-sample transform it is indexed on the device."""
    import torch

    if transform is not None:
        return Split(Normalized(inputs, targets, info, transform), targets=lambda: targets, light=True)
    if info.mean:
        shape = (1, -1, *[1] * (inputs.ndim - 2))
        inputs = (inputs - torch.tensor(info.mean).view(shape)) / torch.tensor(info.std).view(shape)
    return Split(torch.utils.data.TensorDataset(inputs, targets), (inputs, targets))
