"""Several views of a sample, for losses that ask for the same answer on all of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from isobatch.runtime.randomness import seed_of
from isobatch.runtime.timm_import import timm
from isobatch.shards.layout import Lanes


class Viewed(NamedTuple):
    """Targets of a micro batch in which a shard's samples are all its views, view by view.

    `labels` (N,) or (N, C) of the samples; `lanes`: how the shards lie in the N samples.
    """

    labels: Tensor
    lanes: Lanes


class Views:
    """`prepare` of a Feed: (N, ...) inputs become (num_splits * N, ...)."""

    def __init__(self, transform: Any, num_splits: int, noise: float, shift: float, seed: int):
        self.transform, self.num_splits, self.noise, self.shift, self.seed = transform, num_splits, noise, shift, seed

    def __call__(self, inputs: Tensor, targets: Tensor, step: int, shards: tuple[int, ...],
                 lanes: Lanes) -> tuple[Tensor, Viewed]:  # fmt: skip
        if self.transform is not None:
            inputs, targets = self.transform(inputs, targets, step, shards, lanes)
        parts: list[Tensor] = []
        for shard, part in zip(shards, lanes.split(inputs), strict=True):
            # drawn where the images are: a batch of noise from the host would take longer than a step
            generator = torch.Generator(part.device).manual_seed(seed_of("views", self.seed, step, shard))
            parts.append(torch.cat([part, *(self._view(part, generator) for _ in range(self.num_splits - 1))]))
        return lanes.times(self.num_splits).join(parts), Viewed(targets, lanes)

    def _view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        noise = torch.randn(images.shape, generator=generator, device=images.device)
        if images.ndim == 4:
            images = self._moved(images, generator)
        return images + self.noise * noise

    def _moved(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Each image (N, C, H, W) moved by its own whole number of pixels, edges filled with 0."""
        n, _, height, width = images.shape
        most = round(self.shift * height), round(self.shift * width)
        padded = functional.pad(images, (most[1], most[1], most[0], most[0]))
        top, left = (torch.randint(0, 2 * m + 1, (n, 1), generator=generator, device=images.device) for m in most)
        rows = (top + torch.arange(height, device=images.device))[:, None, :, None]
        columns = (left + torch.arange(width, device=images.device))[:, None, None, :]
        samples = torch.arange(n, device=images.device)[:, None, None, None]
        channels = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
        return padded[samples, channels, rows, columns]


class Agreement:
    """The criterion: timm's JsdCrossEntropy on views (training), cross entropy elsewhere (evaluation)."""

    def __init__(self, num_splits: int, alpha: float, smoothing: float):
        self.views: Any = timm.loss.JsdCrossEntropy(num_splits, alpha, 0.0)
        # timm's own takes class indices only; this one also takes the probabilities that mixup makes
        self.plain = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)
        self.views.cross_entropy_loss = self.plain  # type: ignore[assignment]
        self.num_splits = num_splits

    def __call__(self, output: Tensor, targets: Tensor | Viewed) -> Tensor:
        if not isinstance(targets, Viewed):
            return self.plain(output, targets)  # type: ignore[no-any-return]
        shards = targets.lanes.times(self.num_splits).split(output)
        views = zip(*(shard.chunk(self.num_splits) for shard in shards), strict=True)
        return self.views(torch.cat([targets.lanes.join(view) for view in views]), targets.labels)  # type: ignore[no-any-return]
