"""Group `loss`: what is minimised."""

from typing import Any

from isobatch.loss.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    Distillation,
    Focal,
    JensenShannon,
    Loss,
    MeanSquaredError,
    OutputMean,
    OutputSum,
)
from isobatch.marks import Marks

__all__ = [
    "MARKS",
    "TABLE",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Distillation",
    "Focal",
    "JensenShannon",
    "Loss",
    "MeanSquaredError",
    "OutputMean",
    "OutputSum",
]

TABLE: dict[str, Any] = {
    "cross_entropy": CrossEntropy,
    "focal": Focal,
    "bce": BinaryCrossEntropy,
    "jsd": JensenShannon,
    "distill": Distillation,
    "mse": MeanSquaredError,
    "output_mean": OutputMean,
    "output_sum": OutputSum,
}
MARKS = Marks()
