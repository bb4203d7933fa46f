"""Mixup (Zhang et al. 2017) and CutMix (Yun et al. 2019), by timm's code, within one shard and with the shard's seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from isobatch.runtime import accelerator
from isobatch.runtime.randomness import seed_of
from isobatch.runtime.timm_import import timm
from isobatch.shards.layout import Lanes


class ShardMixer:
    """`prepare` of a Feed: mixes each shard of a micro batch with itself; targets become class probabilities.

    Seeded by (seed, step, shard), so the result does not depend on which device a shard is computed on. Evaluation never
    comes here: it keeps its class numbers.

    Args:
        until: from this step on nothing is mixed; None = mixed to the end. Targets stay probabilities.
        sides: least and largest side of what cutmix pastes, as a share of the image's; None = as `cutmix` draws it.
    """

    def __init__(self, mixup: float, cutmix: float, switch: float, prob: float, mode: str, num_classes: int, seed: int,
                 until: int | None = None, sides: Sequence[float] | None = None):  # fmt: skip
        self.seed, self.num_classes, self.until = seed, num_classes, until
        self.mixup: Any = timm.data.Mixup(mixup, cutmix, sides, prob=prob, switch_prob=switch, mode=mode, label_smoothing=0.0,
                                          num_classes=num_classes)  # fmt: skip

    def __call__(self, inputs: Tensor, targets: Tensor, step: int, shards: tuple[int, ...],
                 lanes: Lanes) -> tuple[Tensor, Tensor]:  # fmt: skip
        """
        Args:
            inputs: (N, C, H, W) float, may be mixed in place; targets: (N,) class numbers.
            shards, lanes: which shards these are, and how they lie in the N samples.
        Returns:
            inputs (N, C, H, W) and targets (N, num_classes).
        """
        if self.until is not None and step >= self.until:
            plain: Tensor = timm.data.mixup.mixup_target(targets, self.num_classes, 1.0, 0.0)
            return inputs, plain.to(inputs.dtype)
        images, soft = lanes.split(inputs), []
        before = numpy.random.get_state()  # timm draws from NumPy's global generator
        try:
            for shard, part, labels in zip(shards, images, lanes.split(targets), strict=True):
                numpy.random.seed(seed_of("mix", self.seed, step, shard) % 2**32)
                soft.append(self._mixed(part, labels).to(inputs.dtype))
        finally:
            numpy.random.set_state(before)
        return lanes.join(images) if lanes.shared else inputs, lanes.join(soft)

    def _mixed(self, inputs: Tensor, targets: Tensor) -> Tensor:
        # not Mixup.__call__, which refuses shards of odd size
        lam = self.mixup._mix_batch(inputs) if self.mixup.mode == "batch" else self._mix_each(inputs)
        mixed: Tensor = timm.data.mixup.mixup_target(targets, self.num_classes, lam, 0.0)
        return mixed

    def _mix_each(self, inputs: Tensor) -> Tensor:
        """timm's _mix_elem and _mix_pair with their draws and results, in a few kernels for all images and without a wait.

        Args:
            inputs: (N, C, H, W), mixed in place, each image with the one as far from the other end; as a pair both alike, and
                the one in the middle of an odd number stays as it is.
        Returns:
            share (N, 1) that is left of each.
        """
        pairs = self.mixup.mode == "pair"
        n = len(inputs) // 2 if pairs else len(inputs)
        lam, cuts = self.mixup._params_per_elem(n)
        boxes = numpy.zeros((n, 4), dtype=numpy.float32)
        blends = (lam != 1.0) & ~cuts
        for i in numpy.flatnonzero((lam != 1.0) & cuts):
            boxes[i], lam[i] = timm.data.mixup.cutmix_bbox_and_lam(
                inputs[i].shape, lam[i], ratio_minmax=self.mixup.cutmix_minmax, correct_lam=self.mixup.correct_lam)  # fmt: skip
        table = numpy.column_stack([lam, blends, boxes]).astype(numpy.float32)
        if pairs:
            table = numpy.concatenate([table, numpy.eye(1, 6, dtype=numpy.float32)[: len(inputs) % 2], table[::-1]])
        host = torch.from_numpy(table)
        drawn = accelerator.sent(host, inputs.device)[:, :, None, None, None]
        share, blended, top, bottom, left, right = drawn.unbind(1)
        rows = torch.arange(inputs.shape[2], device=inputs.device)[None, None, :, None]
        columns = torch.arange(inputs.shape[3], device=inputs.device)[None, None, None, :]
        partners, share = inputs.flip(0), share.to(inputs.dtype)
        mixed = torch.where(blended != 0, inputs * share + partners * (1 - share), inputs)
        inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
        inputs.copy_(torch.where(inside, partners, mixed))
        return share[:, :, 0, 0]
