"""The two torch wrappers that `parallel` uses, each with the one thing added that a window needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from isobatch.parallel import DistributedDataParallel as Options


class Participant(nn.Module):
    """The model as DDP sees it, with a way to take part in a reduction without a sample.

    `forward(None)` touches every trainable parameter without reading a value: the backward of an empty slice is an exact
    zero, so a rank without a shard adds nothing, and neither batch norm nor any generator notices.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor | None) -> Any:
        if inputs is None:
            return torch.cat([p.reshape(-1)[:0] for p in self.parameters() if p.requires_grad]).sum()
        return self.model(inputs)


def distributed_data_parallel(model: nn.Module, device: torch.device, options: Options) -> nn.Module:
    """DDP without buffer broadcasts (isobatch's own rule keeps batch-norm statistics equal) and with gradients as views
    of the buckets (no copy after the all-reduce)."""
    return nn.parallel.DistributedDataParallel(
        Participant(model),
        device_ids=[device] if device.type == "cuda" else None,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=options.find_unused_parameters is True,
        bucket_cap_mb=options.bucket_mb,
    )


class ShardedDataParallel(nn.DataParallel):
    """DataParallel whose chunk i is shard i: torch's own cut into equal chunks would mix unequal shards."""

    shard_sizes: tuple[int, ...] = ()

    def __init__(self, model: nn.Module, devices: list[torch.device]):
        super().__init__(model, device_ids=devices, output_device=devices[0])

    def forward(self, inputs: Tensor) -> Any:
        if len(self.shard_sizes) > 1:
            return super().forward(inputs)
        return self.module(inputs)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        (batch,) = inputs
        chunks = torch.split(batch, list(self.shard_sizes))
        moved = tuple((c.to(d, non_blocking=True),) for c, d in zip(chunks, self.device_ids, strict=False))
        return moved, tuple({} for _ in moved)
