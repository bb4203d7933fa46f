"""Learning without labels: two views of a digit have to be alike, and unlike those of the other digits of its shard.

A sample has two inputs, the model several outputs, the loss couples the samples of a shard, and a metric of one's own tells
whether neighbours among the features are the same digit.
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import isobatch


class Views:
    """((view, other view), digit), each view (1, 8, 8). In training moved by up to a pixel, with brightness and noise drawn."""

    def __init__(self, split: str):
        digits, chosen = load_digits(), slice(0, 1437) if split == "train" else slice(1437, None)
        self.images = torch.tensor(digits.images[chosen] / 16, dtype=torch.float32).unsqueeze(1)
        self.digits, self.draws = digits.target[chosen].tolist(), split == "train"

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
        return (self.view(self.images[index]), self.view(self.images[index])), self.digits[index]

    def view(self, image: torch.Tensor) -> torch.Tensor:
        if not self.draws:
            return image
        down, right = torch.randint(0, 3, (2,)).tolist()
        moved = functional.pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8]
        return moved * (0.6 + 0.8 * torch.rand(())) + 0.1 * torch.randn(image.shape)


class Encoder(nn.Module):
    """Both views -> their projections, each (N, 32), and the features of the first, (N, width)."""

    def __init__(self, num_classes: int, in_chans: int, width: int = 16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, width),
        )
        self.project = nn.Sequential(nn.ReLU(), nn.Linear(width, 32))

    def forward(self, one: torch.Tensor, two: torch.Tensor) -> dict[str, Any]:
        features = self.features(one)
        return {"views": (self.project(features), self.project(self.features(two))), "features": features}


class Contrast:
    """NT-Xent (Chen et al. 2020). Its samples meet: it is asked once for every shard, on any plan the same."""

    def __init__(self, temperature: float = 0.2):
        self.temperature = temperature

    def __call__(self, output: dict[str, Any], digits: torch.Tensor) -> torch.Tensor:
        views = functional.normalize(torch.cat(output["views"]), dim=1)
        likeness = (views @ views.T / self.temperature).fill_diagonal_(float("-inf"))
        n = len(digits)
        return functional.cross_entropy(likeness, torch.arange(2 * n, device=views.device).roll(n))


def neighbours(outputs: dict[str, Any], digits: torch.Tensor) -> float:
    """How many digits of the whole evaluation have a nearest neighbour of their own kind, 0 .. 1."""
    features = functional.normalize(outputs["features"], dim=1)
    nearest = (features @ features.T).fill_diagonal_(-2).argmax(1)
    return (digits[nearest] == digits).double().mean().item()


isobatch.register("data", "views", Views)
isobatch.register("model", "encoder", Encoder)
isobatch.register("loss", "contrast", Contrast)
isobatch.register("metric", "neighbours", neighbours)
