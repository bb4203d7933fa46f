"""Batch norm over each of several shards that share a forward, with the running statistics that each would leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isobatch.shards.layout import Layout, reshaped
from isobatch.shards.streams import NotApart

Statistics = Tensor | None


def batch_norm(layout: Layout, input: Tensor, running_mean: Statistics, running_var: Statistics,
               weight: Statistics = None, bias: Statistics = None, training: bool = False, momentum: float = 0.1,
               eps: float = 1e-5) -> Tensor:  # fmt: skip
    """torch.nn.functional.batch_norm, for each shard alone; running statistics become the mean of those of the shards.

    Args:
        input: (N, C, ...), N some rows for each sample.
    """
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not layout.rows(len(input)):
        raise NotApart(f"batch norm gets {len(input)} rows, which are not so many for each of its {layout.samples} samples")
    if layout.interleaved and layout.even and layout.samples == len(input) and input.is_contiguous():
        return _by_channel(layout, input, running_mean, running_var, weight, bias, momentum, eps)
    return _by_shard(layout, input, (running_mean, running_var),
                     lambda part, mean, var: F.batch_norm(part, mean, var, weight, bias, True, momentum, eps))  # fmt: skip


def _by_channel(layout: Layout, input: Tensor, running_mean: Statistics, running_var: Statistics, weight: Statistics,
                bias: Statistics, momentum: float, eps: float) -> Tensor:  # fmt: skip
    """(size * k, C, H, W), interleaved, is (size, k * C, H, W): one call, in which each shard has channels of its own."""
    shards, (samples, channels, *rest) = len(layout.sizes), input.shape

    def repeated(values: Statistics) -> Statistics:
        return None if values is None else values.repeat(shards)

    mean, var = repeated(running_mean), repeated(running_var)
    wide = input.view(samples // shards, shards * channels, *rest)
    output = F.batch_norm(wide, mean, var, repeated(weight), repeated(bias), True, momentum, eps)
    for running, found in ((running_mean, mean), (running_var, var)):
        if running is not None and found is not None:
            torch.mean(found.view(shards, channels), 0, out=running)
    return reshaped(output, input.shape)


def _by_shard(layout: Layout, input: Tensor, running: Sequence[Statistics], norm: Callable[..., Tensor]) -> Tensor:
    """One call for each shard, on a copy of its rows where they have no view."""
    copies = [[None if r is None else r.clone() for r in running] for _ in layout.sizes]
    parts = [norm(part, *copy) for part, copy in zip(layout.split(input), copies, strict=True)]
    for target, *found in zip(running, *copies, strict=True):
        if target is not None:
            torch.mean(torch.stack([f for f in found if f is not None]), 0, out=target)
    return layout.join(parts)


def instance_norm(layout: Layout, input: Tensor, running_mean: Statistics = None, running_var: Statistics = None,
                  weight: Statistics = None, bias: Statistics = None, use_input_stats: bool = True, momentum: float = 0.1,
                  eps: float = 1e-5) -> Tensor:  # fmt: skip
    """torch.nn.functional.instance_norm. Samples are normalised alone anyhow; only the mean over them is by shard, and it is
    the mean over all where shards are of one size."""
    if not use_input_stats or running_mean is None or layout.even:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return _by_shard(layout, input, (running_mean, running_var),
                     lambda part, mean, var: F.instance_norm(part, mean, var, weight, bias, True, momentum, eps))  # fmt: skip


def torch_batch_norm(layout: Layout, input: Tensor, weight: Statistics, bias: Statistics, running_mean: Statistics,
                     running_var: Statistics, training: bool, momentum: float, eps: float,
                     cudnn_enabled: bool = True) -> Tensor:  # fmt: skip
    """torch.batch_norm, whose arguments come in another order."""
    return batch_norm(layout, input, running_mean, running_var, weight, bias, training, momentum, eps)


NORMS: dict[Any, Callable[..., Tensor]] = {F.batch_norm: batch_norm, torch.batch_norm: torch_batch_norm,
                                           F.instance_norm: instance_norm}  # fmt: skip
