"""A model, a dataset and a loss of one's own, used through `imports=[parts]`."""

import math

import torch
from torch import nn

import isobatch


class SmallCNN(nn.Module):
    """Two convolutions for images of any size."""

    def __init__(self, num_classes: int, in_chans: int, width: int = 16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_chans, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).amax((2, 3)))


class Stripes:
    """Noisy 16 x 16 images of stripes; the class is their direction. Drawn anew each epoch: isobatch seeds every sample."""

    classes = ("horizontal", "vertical")

    def __init__(self, split: str, samples: int = 256):
        self.samples = samples if split == "train" else samples // 4

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        wave = torch.sin(torch.arange(16) * math.pi / 2 + torch.rand(()) * 6).expand(1, 16, 16)
        target = index % 2
        return (wave if target else wave.mT) + 0.3 * torch.randn(1, 16, 16), target


isobatch.register("model", "small_cnn", SmallCNN)
isobatch.register("data", "stripes", Stripes)
isobatch.register("loss", "soft_margin", lambda margin=1.0: nn.MultiMarginLoss(margin=margin))
