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


def learning_layers(model: nn.Module) -> list[Any]:
    """Those of them whose running statistics change in training."""
    return [layer for layer in tracking_layers(model) if layer.training]


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
    return bool(learning_layers(model))


def apply_policy(model: nn.Module, policy: str, plan: BatchPlan, ranks: Ranks, device: torch.device) -> None:
    """Bring `model.batch_norm` about.

    `sync` is only judged here: `synchronised` carries it out, after all trials of a micro batch, which run on one rank.

    Raises:
        ConfigError: `sync` where it cannot be; a shard of one sample, which batch norm cannot normalise.
    """
    layers = [m for m in tracking_layers(model) if isinstance(m, _BatchNorm) and m.training]
    if not layers:
        return
    if policy == "frozen":
        freeze(model)
        return
    if policy == "sync":
        _check_sync(plan, ranks, device)
    if plan.smallest_shard() == 1:
        tail = plan.windows_per_epoch > 1 and plan.batch.effective // plan.batch.num_shards > 1
        key = "batch.shard" if plan.batch.stated else "batch.micro"
        raise ConfigError(
            "sampler.tail" if tail else key, plan.tail if tail else plan.batch.shard,
            f"batch norm would get a shard of one sample (a window of {plan.smallest_tail if tail else plan.batch.effective} "
            f"in {plan.batch.num_shards} shards)",
            f"set sampler.tail=drop, or a larger {key}" if tail else f"raise {key}, or set model.batch_norm=frozen",
        )  # fmt: skip


def _check_sync(plan: BatchPlan, ranks: Ranks, device: torch.device) -> None:
    """Every rank has to have a shard in every micro step: the statistics are a collective of each forward."""
    if device.type not in ("cuda", "xpu"):
        raise ConfigError("model.batch_norm", "sync", f"torch's SyncBatchNorm needs a GPU, and this is {device}",
                          "set model.batch_norm=shard or frozen")  # fmt: skip
    batch, replicas = plan.batch, plan.batch.num_replicas
    if replicas > 1 and batch.num_shards % replicas:
        size, key = -(-batch.effective // (replicas * batch.busiest)), "batch.shard" if batch.stated else "batch.micro"
        raise ConfigError("model.batch_norm", "sync", f"{batch.num_shards} shards on {replicas} ranks leave some without "
                          "one in the last micro step, and the others wait for their statistics",
                          f"set {key}={size}, or model.batch_norm=shard")  # fmt: skip
    if ranks.world_size > 1 and plan.tail_size < batch.num_shards:
        raise ConfigError("sampler.tail", plan.tail, f"the last window of {plan.tail_size} samples leaves ranks without a "
                          "shard, and with model.batch_norm=sync the others wait for their statistics",
                          "set sampler.tail=drop or pad, or model.batch_norm=shard")  # fmt: skip


def synchronised(model: nn.Module) -> nn.Module:
    """`model` with a SyncBatchNorm (torch's, or timm's with activation) in place of each batch norm that learns.

    Parameters and statistics stay the same objects; what is frozen stays as it is.
    """
    from isobatch.runtime.timm_import import timm

    done: dict[int, nn.Module] = {}

    def convert(module: nn.Module) -> nn.Module:
        if id(module) not in done:
            if isinstance(module, _BatchNorm) and module.training:
                done[id(module)] = timm.layers.convert_sync_batchnorm(module)
            else:
                done[id(module)] = module
                for name, child in module._modules.items():
                    if child is not None:
                        module._modules[name] = convert(child)
        return done[id(module)]

    return convert(model)


def decided_by(model: nn.Module, policy: str) -> dict[str, str]:
    """Numbers of the plan that decide which samples are normalised together -> the setting to name."""
    if not learns(model):
        return {}
    return {"shard": "batch.shard", **({"num_replicas": "parallel.nproc"} if policy == "sync" else {})}


def describe(model: nn.Module, policy: str) -> str:
    """The policy as the plan states it; `none` for a model without batch norm."""
    return "none" if not tracking_layers(model) else policy if learns(model) else "frozen"


class ShardStatistics:
    """All running means and variances of a model as views of one flat tensor, so that a shard costs two small copies.

    The layers' own counts of batches are taken from them while a window runs: a kernel per layer and shard, for a number
    that the rule of the window sets anyway. An average over all batches (momentum=None) and torch's SyncBatchNorm
    need theirs, and keep them.
    """

    def __init__(self, model: nn.Module):
        layers = learning_layers(model)
        values = [b for layer in layers for b in (layer.running_mean, layer.running_var)]
        self.counts: list[Tensor] = [layer.num_batches_tracked for layer in layers]
        self.counting = [m for m in layers if m.momentum is None or isinstance(m, nn.SyncBatchNorm)]
        self.taken = [(m, m.num_batches_tracked) for m in layers if m not in self.counting]
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
        covered = {id(b) for layer in layers for b in layer.buffers()}
        self.model, self.others = model, {n: (b, b._version) for n, b in model.named_buffers() if id(b) not in covered}
        self.whole = True

    def begin(self) -> None:
        if self.others:  # as they are now: a resume has written them
            self.others = {n: (b, b._version) for n, b in self.model.named_buffers() if n in self.others}
        if self.flat is not None:
            self.base.copy_(self.flat)
            self.base_counts = [m.num_batches_tracked + 0 for m in self.counting]
            self._detach()  # also where no shard follows: all ranks see the same model

    def enter(self) -> None:
        """Before a shard's forward: start from the window's base."""
        if self.flat is not None:
            self.flat.copy_(self.base)
            for layer, count in zip(self.counting, self.base_counts, strict=True):
                layer.num_batches_tracked.copy_(count)  # an average over all batches depends on it
            self._detach()  # once more after a rollback within the window

    def leave(self, micro: MicroBatch, reducer: Any) -> None:
        """After a shard's forward: hand what it made of the base to the reducer, which knows how to add exactly."""
        if self.flat is not None:
            reducer.add_buffers(micro, self.flat)

    def rollback(self) -> None:
        """Forget the window."""
        if self.flat is not None:
            self._end(self.base)

    def commit(self, reducer: Any) -> None:
        """Mean over the window's non-empty shards, on all ranks; one more tracked batch."""
        if self.others:
            self._name_others()
        if self.flat is not None:
            self._end(reducer.mean_buffers())
            torch._foreach_add_(self.counts, 1)

    def _name_others(self) -> None:
        """After the first window: name what its forwards changed and no rule covers (spectral norm, a norm of one's own)."""
        found, self.others = self.changed(), {}
        if found:
            log.warning("the forward changes buffers that the contract has no rule for (%s%s): each rank keeps what its last "
                        "shard leaves, so they may differ from plan to plan, reduction=exact or not", ", ".join(found[:3]),
                        ", ..." if len(found) > 3 else "")  # fmt: skip

    def changed(self) -> list[str]:
        """Before the first window is committed: the buffers that its forwards have changed and no rule covers."""
        now = dict(self.model.named_buffers())
        return [name for name, (b, version) in self.others.items() if now.get(name) is not b or b._version != version]

    def _end(self, values: Tensor) -> None:
        assert self.flat is not None
        self.flat.copy_(values)
        self.attach()
        for layer, count in zip(self.counting, self.base_counts, strict=True):
            layer.num_batches_tracked.copy_(count)

    def _detach(self) -> None:
        if self.whole:
            self.whole = False
            for layer, _ in self.taken:
                layer._buffers["num_batches_tracked"] = None

    def attach(self) -> None:
        """Give the layers their counts back, wherever a window was broken off: the model is complete again."""
        self.whole = True
        for layer, count in self.taken:
            layer._buffers["num_batches_tracked"] = count
