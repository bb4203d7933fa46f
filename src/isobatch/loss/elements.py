"""Losses that count elements: pixels, tokens, weighted classes. Each is torch's own sum beside torch's own divisor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isobatch.errors import ConfigError
from isobatch.given import Sum

TORCHS = -100  # the label that torch leaves out where nobody says which
NO_LABEL = -(2**31)  # one that nobody has: then every other one is a class, or an error


class ElementCrossEntropy(nn.Module):
    """Cross entropy of logits (N, C, ...) and labels (N, ...) or probabilities (N, C, ...).

    A plain mean where every sample is one element that weighs 1, else a Sum: torch's `reduction="sum"` over the divisor of its
    `reduction="mean"`.

    Args:
        weights: (C,). ignore_index: see CrossEntropy.
    """

    couples = False  # samples meet in sums alone
    draws = False

    def __init__(self, weights: Sequence[float] | Tensor | None, ignore_index: int | None, label_smoothing: float = 0.0):
        super().__init__()
        # a plain attribute: no checkpoint holds it, and it follows the output to its device and dtype
        self.weights = None if weights is None else torch.as_tensor(weights, dtype=torch.float64)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def forward(self, output: Tensor, targets: Tensor) -> Tensor | Sum:
        weights = self.weights_for(output)
        if targets.is_floating_point():
            return self.of_probabilities(output, targets, weights)
        if targets.ndim == 1 and weights is None and self.ignore_index is None:
            return self.plain(output, targets)
        ignored = self.ignored(targets)
        return Sum(self.total(output, targets, weights, ignored), counted(targets, weights, ignored))

    def ignored(self, targets: Tensor) -> int:
        """The label that is left out; NO_LABEL: none is."""
        if self.ignore_index is not None:
            return self.ignore_index
        return TORCHS if targets.ndim > 1 else NO_LABEL

    def weights_for(self, output: Tensor) -> Tensor | None:
        if self.weights is not None and len(self.weights) != output.shape[1]:
            raise ConfigError("loss.class_weights", self.weights.tolist(), f"has {len(self.weights)} weights, and the model "
                              f"{output.shape[1]} classes", "give one for each class")  # fmt: skip
        if self.weights is not None and (self.weights.device, self.weights.dtype) != (output.device, output.dtype):
            self.weights = self.weights.to(output.device, output.dtype)
        return self.weights

    def plain(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output, targets, ignore_index=NO_LABEL, label_smoothing=self.label_smoothing)

    def total(self, output: Tensor, targets: Tensor, weights: Tensor | None, ignored: int) -> Tensor:
        return functional.cross_entropy(output, targets, weights, ignore_index=ignored, reduction="sum",
                                        label_smoothing=self.label_smoothing)  # fmt: skip

    def of_probabilities(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor | Sum:
        """torch divides by the number of elements, whatever they weigh."""
        if targets.ndim == 2 and weights is None:
            return functional.cross_entropy(output, targets, label_smoothing=self.label_smoothing)
        total = functional.cross_entropy(output, targets, weights, reduction="sum", label_smoothing=self.label_smoothing)
        return Sum(total, targets.numel() // targets.shape[1])


class FocalLoss(ElementCrossEntropy):
    """(1 - p)^gamma * cross entropy, p the probability of the right class; divided as cross entropy is."""

    draws = False

    def __init__(self, weights: Sequence[float] | None, ignore_index: int | None, gamma: float):
        super().__init__(weights, ignore_index)
        self.gamma = gamma

    def each(self, output: Tensor, targets: Tensor, ignored: int) -> Tensor:
        """(N, ...), zero where the label is left out."""
        entropy = functional.cross_entropy(output, targets, ignore_index=ignored, reduction="none")
        missing = -torch.expm1(-entropy)
        # the slope of a power below 1 is infinite at 0, where the entropy's is 0
        return missing.clamp(min=1e-12).pow(self.gamma) * entropy if self.gamma else entropy

    def plain(self, output: Tensor, targets: Tensor) -> Tensor:
        return self.each(output, targets, NO_LABEL).mean()

    def total(self, output: Tensor, targets: Tensor, weights: Tensor | None, ignored: int) -> Tensor:
        each = self.each(output, targets, ignored)
        return (each if weights is None else each * weights[targets.clamp(min=0)]).sum()

    def of_probabilities(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor | Sum:
        raise TypeError("the focal loss wants one class per element, not probabilities (mixup)")


def counted(targets: Tensor, weights: Tensor | None, ignored: int) -> Tensor:
    """What torch divides a mean over `targets` by, 0-d: elements, or the sum of their weights; without the `ignored`."""
    valid = targets != ignored
    if weights is None:
        return valid.sum()
    return weights[torch.where(valid, targets, 0)].mul(valid).sum()


def by_elements(criterion: Any) -> Any:
    """`criterion`, or for torch's own cross entropy, whose mean over a shard is no part of a mean over the window where
    elements are left out or weighted, the same by elements.
    """
    if type(criterion) is not nn.CrossEntropyLoss or criterion.reduction != "mean":
        return criterion
    ignored = criterion.ignore_index
    return ElementCrossEntropy(criterion.weight, None if ignored == TORCHS else ignored, criterion.label_smoothing)


class OnDevice(nn.Module):
    """A criterion with a tensor as attribute `name` that follows the output to its device and dtype."""

    def __init__(self, criterion: nn.Module, name: str, values: Any):
        super().__init__()
        self.criterion, self.name = criterion, name
        setattr(criterion, name, torch.as_tensor(values, dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Any:
        now = getattr(self.criterion, self.name)
        if (now.device, now.dtype) != (output.device, output.dtype):
            setattr(self.criterion, self.name, now.to(output.device, output.dtype))
        return self.criterion(output, targets)
