"""Operators that torch has for GPUs alone: those of SyncBatchNorm, written with the CPU's. And what it says of some."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

OF_ATTENTION = ("Flash Attention defaults to a non-deterministic algorithm. To explicitly enable determinism call "
                "torch.use_deterministic_algorithms(True, warn_only=False).")  # fmt: skip
# kernels of CUDA (some of them) that add in any order -> under which name torch speaks of them
ANY_ORDER = {
    "_scaled_dot_product_flash_attention_for_cpu_backward": "",
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d_backward_cuda",
    "upsample_bilinear2d_backward": "upsample_bilinear2d_backward_out_cuda",
    "grid_sampler_2d_backward": "grid_sampler_2d_backward_cuda", "avg_pool3d_backward": "avg_pool3d_backward_cuda",
}  # fmt: skip


def alert(operator: str) -> None:
    """What torch says of a kernel that is not deterministic, under use_deterministic_algorithms.

    Raises:
        RuntimeError: it was not to be used. (Attention has a deterministic kernel, which is then taken.)
    """
    mode = torch.get_deterministic_debug_mode()
    if not mode or (name := ANY_ORDER.get(operator)) is None:
        return
    if name == "":
        if mode == 1:
            warnings.warn(OF_ATTENTION, UserWarning, stacklevel=2)
        return
    problem = f"{name} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True"
    if mode == 2:
        raise RuntimeError(f"{problem})'.")
    warnings.warn(f"{problem}, warn_only=True)'.", UserWarning, stacklevel=2)


def _over_channels(x: Tensor) -> tuple[list[int], list[int]]:
    """(all dimensions but the channels', the shape that makes (C,) fit x (N, C, ...))."""
    return [d for d in range(x.dim()) if d != 1], [1, -1, *[1] * (x.dim() - 2)]


def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dims, _ = _over_channels(x)
    wide = x.float()
    return wide.mean(dims), (wide.var(dims, correction=0) + eps).rsqrt()


def gather_stats(x: Tensor, mean: Tensor, invstd: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
                 momentum: float, eps: float, counts: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of all ranks together, from each one's `mean` and `invstd` (ranks, C) over `counts` (ranks,) elements."""
    share = counts.double().view(-1, 1) / counts.double().sum()
    total = (mean.double() * share).sum(0)
    var = ((invstd.double().pow(-2) - eps + (mean.double() - total).square()) * share).sum(0)
    n = counts.double().sum()
    if running_mean is not None and running_var is not None:
        running_mean.mul_(1 - momentum).add_(total, alpha=momentum)
        running_var.mul_(1 - momentum).add_(var * n / (n - 1), alpha=momentum)
    return total.to(mean.dtype), (var + eps).rsqrt().to(mean.dtype)


def elemt(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    _, shape = _over_channels(x)
    made = (x.float() - mean.view(shape)) * invstd.view(shape)
    if weight is not None and bias is not None:
        made = made * weight.view(shape) + bias.view(shape)
    return made.to(x.dtype)


def backward_reduce(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, input_g: bool, weight_g: bool,
                    bias_g: bool) -> tuple[Tensor, ...]:  # fmt: skip
    dims, shape = _over_channels(x)
    sum_dy = grad.float().sum(dims)
    sum_dy_xmu = (grad.float() * (x.float() - mean.view(shape))).sum(dims)
    return sum_dy, sum_dy_xmu, sum_dy_xmu * invstd, sum_dy.clone()


def backward_elemt(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, sum_dy: Tensor,
                   sum_dy_xmu: Tensor, count: Tensor) -> Tensor:  # fmt: skip
    _, shape = _over_channels(x)
    n = count.sum()
    factor = invstd if weight is None else invstd * weight
    centred = (x.float() - mean.view(shape)) * (invstd.square() * sum_dy_xmu / n).view(shape)
    return ((grad.float() - (sum_dy / n).view(shape) - centred) * factor.view(shape)).to(x.dtype)


TABLE: dict[str, Any] = {
    "batch_norm_stats": stats, "batch_norm_gather_stats_with_counts": gather_stats, "batch_norm_elemt": elemt,
    "batch_norm_backward_reduce": backward_reduce, "batch_norm_backward_elemt": backward_elemt,
}  # fmt: skip
