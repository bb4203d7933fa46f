"""The two torch wrappers that `parallel` uses, each with what a window needs added."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isobatch.errors import JobFailed
from isobatch.parallel.unused import trainable, without_gradient
from isobatch.train.batch_norm import tracking_layers

if TYPE_CHECKING:
    from isobatch.parallel import DistributedDataParallel as Options
    from isobatch.runtime.distributed import Ranks

log = logging.getLogger(__name__)


class Participant(nn.Module):
    """The model as DDP sees it, with a way to take part in a reduction without a sample.

    `forward(None)` touches trainable parameters without reading a value: the backward of an empty slice is an exact
    zero, so a rank without a shard adds nothing, and neither batch norm nor any generator notices.

    Args:
        looks: DDP looks for parameters without a gradient. Then a rank without a shard must touch just one parameter
            (`anchor`): the others would get zeros where a single process has no gradient at all, and weight decay and
            momentum would move them.
    """

    def __init__(self, model: nn.Module, looks: bool = False, anchor: nn.Parameter | None = None):
        super().__init__()
        self.model, self.looks = model, looks
        self._anchor = [anchor if anchor is not None else trainable(model)[-1]]  # in a list: not registered twice

    def forward(self, inputs: Tensor | None) -> Any:
        if inputs is None:
            return _zero(self._anchor if self.looks else trainable(self.model))
        return self.model(inputs)


def _zero(parameters: list[nn.Parameter]) -> Tensor:
    """0 (0-d, fp32) whose backward gives every one of `parameters` a gradient of zeros."""
    return torch.cat([p.reshape(-1)[:0].float() for p in parameters]).sum()


class WatchedDDP(nn.parallel.DistributedDataParallel):
    """DDP that says in the words of this project what is wrong with parameters that got no gradient."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            raise JobFailed(
                "some parameters got no gradient in the last step, and DDP still waits for them; set "
                "parallel.find_unused_parameters=auto (looks at the first shard) or true (looks at every step: for "
                f"models that use other parameters in other steps); DDP says: {str(error).splitlines()[0]}"
            ) from None


def distributed_data_parallel(model: nn.Module, ranks: Ranks, device: torch.device, options: Options,
                              first: Tensor | None = None) -> nn.Module:  # fmt: skip
    """DDP without buffer broadcasts (isobatch's own rule keeps batch-norm statistics equal) and with gradients as views
    of the buckets (no copy after the all-reduce).

    Args:
        first: inputs of this rank's first shard, which `find_unused_parameters=auto` looks at; None: it has none.
    """
    looks, anchor = options.find_unused_parameters is True, None
    if options.find_unused_parameters == "auto":
        looks, anchor = _look(model, ranks, device, first)
    # depthwise kernels (C, 1, k, k) have two descriptions of one and the same layout, which DDP takes for two layouts
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    for p in model.parameters():
        p.grad_dtype = p.dtype  # DDP's buckets have the weights' dtype, so half copies collect in half here
    wrapped = WatchedDDP(
        Participant(model, looks, anchor),
        device_ids=None if device.type == "cpu" else [device],
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=looks,
        bucket_cap_mb=options.bucket_mb,
    )
    if options.reduce_dtype is not None or options.gradient_predivide is not None:
        dtype = None if options.reduce_dtype is None else getattr(torch, options.reduce_dtype)
        before = float(ranks.world_size if options.gradient_predivide is None else options.gradient_predivide)
        state = dtype, before, ranks.world_size / before
        # a lambda, because torch checks annotations and cannot read those of a module with postponed evaluation
        wrapped.register_comm_hook(state, lambda state, bucket: mean_hook(state, bucket))
    return wrapped


def mean_hook(state: tuple[torch.dtype | None, float, float], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """apex's `allreduce_always_fp32` and `gradient_predivide_factor` as a communication hook.

    Args:
        state: (dtype to add in or None, divisor before the sum, divisor after it); the product of the divisors is the
            number of ranks.
    """
    dtype, before, after = state
    buffer = bucket.buffer()
    wide = buffer.to(dtype or buffer.dtype)
    future = dist.all_reduce(wide.div_(before), async_op=True).get_future()  # type: ignore[union-attr]

    def mean(done: torch.futures.Future[Any]) -> Tensor:
        total = done.value()[0]
        if after != 1:
            total.div_(after)
        return total if total is buffer else buffer.copy_(total)

    return future.then(mean)


def _look(model: nn.Module, ranks: Ranks, device: torch.device,
          first: Tensor | None) -> tuple[bool, nn.Parameter | None]:  # fmt: skip
    """Whether any rank that looked misses a gradient, and a parameter that some rank has one for. Ranks agree."""
    parameters = trainable(model)
    used = torch.zeros(len(parameters), dtype=torch.int32, device=device)
    if first is not None:
        used = torch.tensor([not missed for missed in without_gradient(model, first)], dtype=torch.int32, device=device)
    everywhere = ranks.all_reduce(used.clone() if first is not None else torch.ones_like(used), "min").tolist()
    somewhere = ranks.all_reduce(used, "max").tolist()
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    missed = [name for name, all_use in zip(names, everywhere, strict=True) if not all_use]
    if not missed:
        log.info("parallel.find_unused_parameters=auto: every parameter gets a gradient, chose false")
        return False, None
    log.info("parallel.find_unused_parameters=auto: no gradient for %d of %d parameters (%s%s), chose true",
             len(missed), len(names), ", ".join(missed[:3]), ", ..." if len(missed) > 3 else "")  # fmt: skip
    anchor = next((p for p, one_uses in zip(reversed(parameters), reversed(somewhere), strict=True) if one_uses), None)
    return True, anchor


class ShardedDataParallel(nn.DataParallel):
    """DataParallel whose chunk i is shard i: torch's own cut into equal chunks would mix unequal shards."""

    shard_sizes: tuple[int, ...] = ()

    def __init__(self, model: nn.Module, devices: list[torch.device]):
        super().__init__(model, device_ids=devices, output_device=devices[0])

    def forward(self, inputs: Tensor) -> Any:
        if len(self.shard_sizes) == 1:
            return self.module(inputs)
        output = super().forward(inputs)
        average_statistics(self.module, self.copies)
        return output

    def replicate(self, module: nn.Module, device_ids: Any) -> Any:
        self.copies = super().replicate(module, device_ids)
        return self.copies

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        (batch,) = inputs
        views = len(batch) // sum(self.shard_sizes)  # of each sample (loss=jsd trains on several)
        chunks = torch.split(batch, [views * size for size in self.shard_sizes])
        moved = tuple((c.to(d, non_blocking=True),) for c, d in zip(chunks, self.device_ids, strict=False))
        return moved, tuple({} for _ in moved)


@torch.no_grad()
def average_statistics(model: nn.Module, copies: list[nn.Module]) -> None:
    """Bring the running statistics of all `copies` together in `model`: torch would keep those of the first alone."""
    of_copies = [[b for layer in tracking_layers(c) for b in (layer.running_mean, layer.running_var)] for c in copies]
    mine = [b for layer in tracking_layers(model) for b in (layer.running_mean, layer.running_var)]
    for buffer, *others in zip(mine, *of_copies, strict=True):
        assert buffer is not None
        buffer.copy_(torch.stack([o.to(buffer.device) for o in others if o is not None]).mean(0))
