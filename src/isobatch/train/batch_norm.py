"""Running statistics of batch norm under a window of shards.

Every shard of a window starts from the window's base statistics; what is committed is the mean over the non-empty shards,
and one tracked batch. For torch's update rule that is base * (1 - momentum) + momentum * mean(shard statistics): what one
step on the whole window would do with the mean of the shards' statistics, on any hardware plan.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from isobatch.errors import ConfigError

if TYPE_CHECKING:
    from isobatch.batch_plan import BatchPlan
    from isobatch.data.feed import MicroBatch
    from isobatch.runtime.distributed import Ranks

log = logging.getLogger(__name__)


def tracking_layers(model: nn.Module) -> list[_NormBase]:
    """Layers with running statistics (batch norm, instance norm with tracking; timm's are subclasses)."""
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]


def freeze(model: nn.Module) -> None:
    """Keep running statistics as they are and normalise with them, in training too (`model.batch_norm=frozen`)."""
    for layer in tracking_layers(model):
        keep_statistics(layer)


def keep_statistics(layer: nn.Module) -> None:
    """Let `layer` normalise with its running statistics for good, whatever mode its model is put into."""
    layer.eval()
    layer.train = lambda mode=True, layer=layer: layer  # type: ignore[method-assign,misc]


def learns(model: nn.Module) -> bool:
    """Whether any running statistics still change in training."""
    return any(layer.training for layer in tracking_layers(model))


def apply_policy(model: nn.Module, policy: str, plan: BatchPlan, ranks: Ranks, device: torch.device) -> None:
    """Bring `model.batch_norm` about.

    Raises:
        ConfigError: `sync` without CUDA; a shard of one sample, which batch norm cannot normalise.
    """
    layers = [m for m in tracking_layers(model) if isinstance(m, _BatchNorm) and m.training]
    if not layers:
        return
    if policy == "frozen":
        freeze(model)
        return
    if policy == "sync" and device.type != "cuda":
        raise ConfigError("model.batch_norm", policy, "torch's SyncBatchNorm needs CUDA",
                          "set model.batch_norm=shard or frozen")  # fmt: skip
    if plan.smallest_shard() == 1:
        tail = plan.windows_per_epoch > 1 and plan.batch.effective // plan.batch.num_shards > 1
        raise ConfigError(
            "sampler.tail" if tail else "batch.micro", plan.tail if tail else plan.batch.micro,
            f"batch norm would get a shard of one sample (a window of {plan.tail_size if tail else plan.batch.effective} "
            f"in {plan.batch.num_shards} shards)",
            "set sampler.tail=drop" if tail else "raise batch.micro, or set model.batch_norm=frozen",
        )  # fmt: skip


def describe(model: nn.Module, policy: str) -> str:
    """The policy as the plan states it; `none` for a model without batch norm."""
    return "none" if not tracking_layers(model) else policy if learns(model) else "frozen"


class ShardStatistics:
    """All running means and variances of a model as views of one flat tensor, so that a shard costs two small copies."""

    def __init__(self, model: nn.Module):
        layers: list[Any] = [layer for layer in tracking_layers(model) if layer.training]
        values = [b for layer in layers for b in (layer.running_mean, layer.running_var)]
        self.counts: list[Tensor] = [layer.num_batches_tracked for layer in layers]
        self.flat: Tensor | None = None
        if values:
            self.flat = torch.cat([v.reshape(-1) for v in values])
            offset = 0
            for layer in layers:
                for name in ("running_mean", "running_var"):
                    old = layer._buffers[name]
                    layer._buffers[name] = self.flat[offset : offset + old.numel()].view(old.shape)
                    offset += old.numel()
            self.base = self.flat.clone()
        self.base_counts: list[Tensor] = []
        # momentum=None averages over all batches, so what a shard makes of the base depends on the count too
        self.cumulative = any(layer.momentum is None for layer in layers)
        covered = {id(b) for layer in layers for b in layer.buffers()}
        self.model, self.others = model, {n: (b, b._version) for n, b in model.named_buffers() if id(b) not in covered}

    def begin(self) -> None:
        if self.flat is not None:
            self.base.copy_(self.flat)
            self.base_counts = list(torch._foreach_add(self.counts, 0))

    def enter(self) -> None:
        """Before a shard's forward: start from the window's base."""
        if self.flat is not None:
            self.flat.copy_(self.base)
            if self.cumulative:
                torch._foreach_copy_(self.counts, self.base_counts)

    def leave(self, micro: MicroBatch, reducer: Any) -> None:
        """After a shard's forward: hand what it made of the base to the reducer, which knows how to add exactly."""
        if self.flat is not None:
            reducer.add_buffers(micro, self.flat)

    def rollback(self) -> None:
        """Forget the window."""
        if self.flat is not None:
            self.flat.copy_(self.base)
            torch._foreach_copy_(self.counts, self.base_counts)

    def commit(self, reducer: Any) -> None:
        """Mean over the window's non-empty shards, on all ranks; one more tracked batch."""
        if self.others:
            self._name_others()
        if self.flat is not None:
            self.flat.copy_(reducer.mean_buffers(self.flat))
            torch._foreach_copy_(self.counts, self.base_counts)
            torch._foreach_add_(self.counts, 1)

    def _name_others(self) -> None:
        """After the first window: name what its forwards changed and no rule covers (spectral norm, a norm of one's own)."""
        now, self.others, before = dict(self.model.named_buffers()), {}, self.others
        found = [name for name, (b, version) in before.items() if now.get(name) is not b or b._version != version]
        if found:
            log.warning("the forward changes buffers that the contract has no rule for (%s%s): each rank keeps what its last "
                        "shard leaves, so they may differ from plan to plan, reduction=exact or not", ", ".join(found[:3]),
                        ", ..." if len(found) > 3 else "")  # fmt: skip
