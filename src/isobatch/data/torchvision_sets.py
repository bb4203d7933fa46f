"""torchvision's small datasets: cifar10, cifar100, mnist, fashion_mnist. All of them fit into memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.checks import choice
from isobatch.data.base import DataInfo, Reading, Split, Splits
from isobatch.data.held_out import HeldOut, pairs
from isobatch.errors import ConfigError
from isobatch.marks import option

if TYPE_CHECKING:
    from torch import Tensor

# dataset -> (folder that torchvision keeps it in, mean, std)
KNOWN: dict[str, tuple[str, tuple[float, ...], tuple[float, ...]]] = {
    "CIFAR10": ("cifar-10-batches-py", (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)),
    "CIFAR100": ("cifar-100-python", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "MNIST": ("MNIST", (0.1307,), (0.3081,)),
    "FashionMNIST": ("FashionMNIST", (0.286,), (0.353,)),
}


@dataclass(frozen=True, kw_only=True)
class TorchVision(HeldOut, Reading):
    """
    Args:
        dataset: torchvision's class.
        root: where it lies, or is put.
        download: fetch it when it is not there.
    """

    name: str = "torchvision"
    dataset: str = "CIFAR10"
    root: str | None = option(None, resume="free", path="file")
    download: bool = option(False, resume="free")
    kind = "images"

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("data.dataset", self.dataset, tuple(KNOWN))

    def check(self) -> None:
        """Raise ConfigError when the files are not there and may not be fetched."""
        if not self.root:
            raise ConfigError("data.root", self.root, "is not set", "set data.root=<folder for the dataset>")
        folder = KNOWN[self.dataset][0]
        if not self.download and not (Path(self.root) / folder).is_dir():
            raise ConfigError("data.root", self.root, f"has no folder {folder}",
                              "set data.download=true, or data.root to where it lies")  # fmt: skip

    def load(self, augment: Any, seed: int) -> Splits:
        import numpy
        import torch
        import torchvision

        self.check()
        _, mean, std = KNOWN[self.dataset]

        def loaded(train: bool) -> Any:
            try:
                return getattr(torchvision.datasets, self.dataset)(self.root, train=train, download=self.download)
            except (RuntimeError, OSError) as error:  # what torchvision raises for missing or damaged files
                raise ConfigError("data.root", self.root, f"torchvision could not load {self.dataset} ({error})",
                                  "set data.download=true") from None  # fmt: skip

        def arrays(dataset: Any) -> tuple[Tensor, Tensor]:
            images = torch.from_numpy(numpy.asarray(dataset.data))
            images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
            return images, torch.as_tensor(dataset.targets, dtype=torch.int64)

        source = loaded(True)
        images, labels = arrays(source)
        classes = tuple(map(str, source.classes))
        info = DataInfo(self.dataset, tuple(images.shape[1:]), len(classes), mean, std, classes)
        train, evaluation, test = pairs((images, labels), arrays(loaded(False)), self)
        return Splits(pixel_split(*train, info, augment), pixel_split(*evaluation, info, None), info,
                      None if test is None else pixel_split(*test, info, None))  # fmt: skip


class PixelSet:
    """`dataset[i] -> (transformed pixels (C, H, W) uint8, class number)` over uint8 images in memory."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Any):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), int(self.labels[index])


def pixel_split(images: Tensor, labels: Tensor, info: DataInfo, transform: Any) -> Split:
    """A split over uint8 images (N, C, H, W): on the device as they are, or through workers when they are augmented."""
    import torch

    if transform is None:
        return Split(torch.utils.data.TensorDataset(images, labels), (images, labels), info=info)
    return Split(PixelSet(images, labels, transform), targets=lambda: labels, info=info)
