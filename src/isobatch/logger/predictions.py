"""A few evaluated images with what the model says of them."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from isobatch.data import DataInfo
    from isobatch.evaluate import Evaluator

COLUMNS = ("image", "prediction", "target", "confidence", "right")


@dataclass(frozen=True)
class Predictions:
    """Of n images.

    Attributes:
        images: (n, channels, height, width), as the model got them.
        probabilities: (n, classes).
        targets: (n,).
    """

    images: Tensor
    probabilities: Tensor
    targets: Tensor
    info: DataInfo


def predict(evaluator: Evaluator, model: nn.Module, info: DataInfo, count: int) -> Predictions | None:
    """What `model` says of the first `count` samples of the evaluation split; None if they are no labelled images.

    Takes this process alone: no rank waits for another.
    """
    import torch

    from isobatch.data.feed import Request

    if len(info.shape) != 3 or not info.num_classes:
        return None
    request = Request(0, torch.arange(min(count, len(evaluator.split))))
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), evaluator.precision.autocast(evaluator.device):
            inputs, targets = next(iter(evaluator.source.batches(iter([request]))))
            output = model(inputs).float().softmax(1)
    finally:
        for module, training in modes:
            module.training = training
    return Predictions(inputs.float().cpu(), output.cpu(), targets.cpu(), info)


def encoded(predictions: Predictions) -> list[list[Any]]:
    """Rows of COLUMNS, each image as PNG in base64, so that they fit into a JSON message."""
    names = predictions.info.class_names
    rows: list[list[Any]] = []
    for image, probabilities, target in zip(
        predictions.images, predictions.probabilities, predictions.targets, strict=True
    ):
        best, truth = int(probabilities.argmax()), int(target)
        name = [names[i] if i < len(names) else str(i) for i in (best, truth)]
        rows.append([png(image, predictions.info), *name, round(float(probabilities[best]), 4), best == truth])
    return rows


def png(image: torch.Tensor, info: DataInfo) -> str:
    """One (channels, height, width) image, its normalisation undone; small ones enlarged so that a person sees them."""
    import torch
    from PIL import Image

    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (info.mean, info.std))
    pixels = (image * std + mean).clamp(0, 1).mul(255).round().byte()
    pixels = pixels[:3].permute(1, 2, 0) if len(pixels) >= 3 else pixels[0]
    picture = Image.fromarray(pixels.numpy())
    scale = max(1, 64 // max(picture.size))
    picture = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
