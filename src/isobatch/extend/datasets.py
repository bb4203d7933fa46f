"""Around a user's dataset: augmentation of its images, some of its samples, its labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from isobatch.data.held_out import SomeSamples

if TYPE_CHECKING:
    from torch import Tensor


class Augmented:
    """A user's dataset of images with `augment` applied to its inputs."""

    def __init__(self, dataset: Any, transform: Any, channels: int | None = None):
        self.dataset, self.transform, self.channels = dataset, transform, channels

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:  # classes, targets, describe
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        from isobatch.pixels import as_pixels

        image, target = self.dataset[index]
        return self.transform(as_pixels(image, self.channels)), target


def labels_of(dataset: Any) -> Callable[[], Tensor] | None:
    """All class labels from `dataset.targets`, when there are such."""
    if not hasattr(dataset, "targets"):
        return None

    def labels() -> Tensor:
        import torch

        return torch.as_tensor(dataset.targets)

    return labels


class SomeOfOwn(SomeSamples):
    """Some samples of a user's dataset, with what it says of its classes and labels."""

    def __getattr__(self, name: str) -> Any:
        if name in ("classes", "num_classes"):
            return getattr(self.dataset, name)
        if name == "targets":
            import torch

            return torch.as_tensor(self.dataset.targets)[self.rows]
        raise AttributeError(name)


def one_class_each(dataset: Any) -> Any:
    """(N,) class numbers, by which samples are held out in proportion; all alike where it has no such `targets`."""
    import numpy

    found = numpy.asarray(getattr(dataset, "targets", ()))
    return (
        found if found.shape == (len(dataset),) and found.dtype.kind in "iu" else numpy.zeros(len(dataset), dtype=numpy.int64)
    )
