"""Group `loss`: what is minimised. `averages` tells how shards are weighted: a mean over samples, or a sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.checks import within

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class CrossEntropy:
    """Softmax cross entropy on class indices (N,) or class probabilities (N, C) (mixup); logits (N, C)."""

    name: str = "cross_entropy"
    label_smoothing: float = 0.0
    averages = True

    def __post_init__(self) -> None:
        within("loss.label_smoothing", self.label_smoothing, 0, 1)

    def build(self) -> nn.Module:
        from torch import nn

        return nn.CrossEntropyLoss(label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class MeanSquaredError:
    """Mean over samples of the squared difference; output and target of the same shape."""

    name: str = "mse"
    averages = True

    def build(self) -> nn.Module:
        from torch import nn

        return nn.MSELoss()


@dataclass(frozen=True)
class OutputMean:
    """The mean of the model's output; the target is not used."""

    name: str = "output_mean"
    averages = True

    def build(self) -> Any:
        return _mean


@dataclass(frozen=True)
class OutputSum:
    """The sum of the model's output; averaged over the shards, as DDP averages gradients. The target is not used."""

    name: str = "output_sum"
    averages = False

    def build(self) -> Any:
        return _sum


def _mean(output: Any, target: Any) -> Any:
    return output.mean()


def _sum(output: Any, target: Any) -> Any:
    return output.sum()


TABLE: dict[str, Any] = {
    "cross_entropy": CrossEntropy,
    "mse": MeanSquaredError,
    "output_mean": OutputMean,
    "output_sum": OutputSum,
}
