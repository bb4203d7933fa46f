"""What this plan cannot keep equal to another one, said before training."""

from __future__ import annotations

import torch
from torch import nn

from isobatch.batch_norm import tracking_layers
from isobatch.batch_plan import BatchPlan
from isobatch.config import Config
from isobatch.distributed import Ranks


def notes(config: Config, model: nn.Module, plan: BatchPlan, ranks: Ranks, device: torch.device) -> list[str]:
    """One line each, most important first."""
    batch, found = plan.batch, []
    if batch.num_shards > 1 and config.model.batch_norm == "shard" and any(m.training for m in tracking_layers(model)):
        found.append(
            f"batch norm normalises over a shard of {batch.micro} samples: batch.micro={batch.micro} is part of the "
            "contract for this model, and another micro batch is another training"
        )
    idle = max(0, batch.num_replicas - batch.num_shards)
    if idle:
        found.append(f"{idle} of {batch.num_replicas} replicas have no shard and wait: lower batch.micro to use them")
    elif batch.num_shards % batch.num_replicas:
        found.append(
            f"{batch.num_shards} shards on {batch.num_replicas} replicas are uneven: some wait for the "
            f"{batch.accumulation_steps} micro steps of the busiest"
        )
    if not config.reduction.exact and batch.num_shards > 1:
        found.append("reduction=fast: plans agree up to rounding; reduction=exact makes them agree to the bit")
    if device.type == "cuda" and not config.deterministic:
        found.append("some CUDA kernels are not deterministic: deterministic=true asks torch for those that are")
    if config.sampler.tail == "pad" and plan.epoch_size > plan.order_size:
        found.append(f"sampler.tail=pad repeats {plan.epoch_size - plan.order_size} sample(s) in every epoch")
    return found
