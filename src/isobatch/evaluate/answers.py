"""The answer to every sample of an evaluation, exact at any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from isobatch.runtime.distributed import Ranks


class Answers:
    """Label, prediction and its probability (softmax) of each of `samples` samples, by index.

    Every sample has a place of its own that one rank fills and all others leave at zero. So a sum over the ranks puts the
    answers together in the order of the index, without rounding, whatever the number of ranks.

    Attributes:
        labels, predictions: (samples,) int64, class numbers. probabilities: (samples,) float32.
    """

    def __init__(self, samples: int, device: torch.device):
        self.labels = torch.zeros(samples, dtype=torch.int64, device=device)
        self.predictions = torch.zeros_like(self.labels)
        self.probabilities = torch.zeros(samples, dtype=torch.float32, device=device)

    def take(self, start: int, output: Tensor, predictions: Tensor, labels: Tensor) -> None:
        """Samples start .. start + n - 1: `output` (n, classes) logits, `predictions` (n,), `labels` (n,)."""
        here = slice(start, start + len(labels))
        self.labels[here] = labels
        self.predictions[here] = predictions
        said = output.float().softmax(1).gather(1, predictions.unsqueeze(1)).squeeze(1)
        self.probabilities[here] = said

    def gather(self, ranks: Ranks) -> Answers:
        """Those of all ranks, on the CPU. A collective."""
        for name in ("labels", "predictions", "probabilities"):
            setattr(self, name, ranks.all_reduce(getattr(self, name)).cpu())
        return self

    def counts(self, num_classes: int) -> Tensor:
        """(classes, classes) int64: how often a sample of the class of the row was taken for that of the column."""
        pairs = self.labels * num_classes + self.predictions
        return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)
