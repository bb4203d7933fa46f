"""A trained model as a program of somebody else uses it: an nn.Module that knows its classes and how images become inputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from isobatch import config as configuration
from isobatch import pixels
from isobatch.checkpoint import read
from isobatch.checks import choice
from isobatch.data.device import ToDevice
from isobatch.errors import ConfigError
from isobatch.evaluate.views import COUNT, averaged
from isobatch.resume import rebuild
from isobatch.resume.rebuild import Trained
from isobatch.tasks.predicting import as_files


class TrainedModel(nn.Module):
    """In evaluation mode, fp32, on the CPU; its weights do not ask for gradients until `requires_grad_()`.

    Attributes:
        network: the model itself. classes: names of its outputs, () = nobody has named them.
        origin: the checkpoint that it is from. step: of training.
        views: of each image, whose outputs `predict` averages: the run's `evaluate.views`.
    """

    def __init__(self, trained: Trained, data: Any, views: str = "one"):
        super().__init__()
        self.views = views
        self.network, self.info, self.origin, self.step = trained.network, trained.info, trained.origin, trained.step
        self.classes = trained.info.class_names
        self._images = len(self.info.shape) == 3 and bool(self.info.mean)
        self._files = as_files(data, trained) if self._images and self.info.in_chans in pixels.MODES else None
        self.eval()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """As the network's own: inputs (N, ...) as `preprocess` makes them -> logits, or whatever it answers."""
        return self.network(*inputs, **named)

    def preprocess(self, image: Any) -> Tensor:
        """One image as the run's evaluation saw it: (C, H, W) float32, cut out, resized and normalised.

        Args:
            image: a path, the bytes of a file, a PIL image, an array (H, W[, C]) or a tensor (C, H, W) of uint8.
        Raises:
            ValueError: the model takes no images that files could become.
        """
        files: Any = self._files
        if files is None:
            raise ValueError(f"{self.origin} takes inputs of shape {self.info.shape} as its data set gave them")
        size = files.eval_size or files.image_size
        box = pixels.center_box(files.crop_pct, size)
        black, white = files.pixel_range or (None, None)
        how = pixels.Decoding(files.in_chans, files.decode == "fast", files.exif == "apply", black, white,
                              files.max_pixels or pixels.MOST_PIXELS)  # fmt: skip
        if isinstance(image, str | Path):
            image = Path(image).read_bytes()
        if isinstance(image, bytes):
            cut = pixels.decode_crop(image, box, size, files.interpolation, how)
        else:
            whole = pixels.as_pixels(image, files.in_chans)
            left, top, width, height = box(whole.shape[-1], whole.shape[-2])
            cut = pixels.resize(whole[:, top : top + height, left : left + width], size, files.interpolation)
        return ToDevice(torch.device("cpu"), self.info, False).normalized(cut.unsqueeze(0))[0]

    @torch.no_grad()
    def predict(self, images: Any, top: int = 1, views: str | None = None) -> list[list[tuple[str, float]]]:
        """The most probable classes of each image, with their probabilities, as `task=predict` gives them.

        Args:
            images: one, or a list of what `preprocess` takes. views: one, flip, five or ten; None = those of the run.

        Raises:
            ValueError: the model has no classes, or takes no images. ConfigError: there are no such views.
        """
        views = self.views if views is None else views
        choice("views", views, tuple(COUNT))
        if not self.info.num_classes:
            raise ValueError(f"{self.origin} answers numbers, not classes")
        several = images if isinstance(images, Sequence) and not isinstance(images, str | bytes) else [images]
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        inputs = torch.stack([self.preprocess(image) for image in several]).to(device)
        logits = averaged(self.network, inputs, views, self.info.shape)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise ValueError(f"{self.origin} answers no class for each image: call the model, model(inputs), for what it says")
        scores = logits.float().sigmoid() if self.info.labels == "several" else logits.float().softmax(1)
        values, numbers = scores.topk(min(top, logits.shape[1]), dim=1)
        return [[(self.classes[i] if i < len(self.classes) else str(i), p) for p, i in zip(some, which, strict=True)]
                for some, which in zip(values.tolist(), numbers.tolist(), strict=True)]  # fmt: skip


def load_run(run: Path, checkpoint: str, weights: str) -> TrainedModel:
    """See isobatch.load."""
    if checkpoint == "best":
        checkpoint = rebuild.best_or_last(run)
    options = SimpleNamespace(load=checkpoint, weights=weights)
    if weights not in ("auto", "ema", "raw"):
        raise ConfigError("weights", weights, "is none of auto, ema, raw", "choose one of them")
    saved = read(run, checkpoint)
    with torch.random.fork_rng([]):  # no generator of the program notices
        trained = rebuild.of_run(saved, options)
    try:
        data = configuration.options("data", saved.state["config"].get("data"))
    except ConfigError:  # a data set of the user's own that is not registered here, or of a later release
        data = None
    evaluated = saved.state["config"].get("evaluate")  # an earlier release has none
    views = evaluated.get("views") if isinstance(evaluated, dict) else None
    return TrainedModel(trained, data, views if views in COUNT else "one")
