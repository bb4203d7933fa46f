"""A few evaluated images with what the model says of them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = ("image", "prediction", "target", "confidence", "right")


@dataclass(frozen=True)
class Predictions:
    """Of n images.

    Attributes:
        images: (n, channels, height, width), as the model got them.
        probabilities: (n, classes).
        targets: (n,).
        names: of the classes, as far as there are any.
        mean, std: per channel, what the images were normalised with.
    """

    images: Tensor
    probabilities: Tensor
    targets: Tensor
    names: Sequence[str]
    mean: Sequence[float]
    std: Sequence[float]


def encoded(predictions: Predictions) -> list[list[Any]]:
    """Rows of COLUMNS, each image as PNG in base64, so that they fit into a JSON message."""
    names = predictions.names
    rows: list[list[Any]] = []
    for image, probabilities, target in zip(predictions.images, predictions.probabilities, predictions.targets, strict=True):
        best, truth = int(probabilities.argmax()), int(target)
        name = [names[i] if i < len(names) else str(i) for i in (best, truth)]
        rows.append([png(image, predictions.mean, predictions.std), *name, round(float(probabilities[best]), 4), best == truth])
    return rows


def png(image: Tensor, mean: Sequence[float], std: Sequence[float]) -> str:
    """One (channels, height, width) image, its normalisation undone; small ones enlarged so that a person sees them."""
    import torch
    from PIL import Image

    shift, scale = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    pixels = (image * scale + shift).clamp(0, 1).mul(255).round().byte()
    pixels = pixels[:3].permute(1, 2, 0) if len(pixels) >= 3 else pixels[0]
    picture = Image.fromarray(pixels.numpy())
    times = max(1, 64 // max(picture.size))
    picture = picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
