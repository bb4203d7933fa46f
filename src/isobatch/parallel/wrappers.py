"""The two torch wrappers that `parallel` uses, each with what a window needs added."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from isobatch.errors import ConfigError, JobFailed
from isobatch.parallel.completion import Completion, zero
from isobatch.parallel.unused import trainable
from isobatch.runtime.trees import PerSample
from isobatch.shards.apart import entered
from isobatch.train.batch_norm import learning_layers

if TYPE_CHECKING:
    from isobatch.parallel import DistributedDataParallel as Options
    from isobatch.runtime.distributed import Ranks
    from isobatch.shards.layout import Lanes


EVERYTHING_MB = 2**40 / 2**20  # a bucket that no model fills


class Participant(nn.Module):
    """The model as DDP sees it, with a way to take part in a reduction without a sample.

    `forward(None)` touches all trainable parameters without reading a value, so a rank without a shard adds exact zeros, and
    neither batch norm nor any generator notices.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any, **named: Any) -> Any:
        idle = len(inputs) == 1 and inputs[0] is None
        return zero(trainable(self.model)) if idle else self.model(*inputs, **named)


class WatchedDDP(nn.parallel.DistributedDataParallel):
    """DDP that has reduced everything when a window ends, whatever its samples use; see completion.py.

    `completion` is None where `find_unused_parameters=false` says that every sample uses everything; then it is checked.
    """

    completion: Completion | None = None

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro step; `last`: of this rank's in the window."""
        with nullcontext() if last else self.no_sync():
            if self.completion is not None:
                self.completion.arrived[:] = bytes(len(self.completion.arrived))
            yield
            if last and self.completion is not None:
                self.completion.complete()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around one micro step that belongs to no window: nothing is sent, nothing is noted."""
        with self.no_sync():
            if self.completion is not None:
                self.completion.watching = False
            yield
            if self.completion is not None:
                self.completion.watching = True

    def idle(self, before_backward: Callable[[], None]) -> None:
        """Take part in a window without a shard."""
        if self.completion is not None:
            self.completion.watching = False
        nothing = self(None)
        before_backward()
        nothing.backward()
        if self.completion is not None:
            self.completion.watching = True

    def end(self) -> None:
        """After a window, before its update.

        Raises:
            JobFailed: a parameter got no gradient, although `find_unused_parameters=false`.
        """
        if self.completion is not None:
            self.completion.end()
            return
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise JobFailed(
                "some parameters got no gradient in this step, and DDP waits for them; set "
                "parallel.find_unused_parameters=auto, which completes them (or true, which does so without a word); DDP "
                f"says: {str(error).splitlines()[0]}"
            ) from None


def distributed_data_parallel(model: nn.Module, ranks: Ranks, device: torch.device, options: Options) -> nn.Module:
    """DDP without buffer broadcasts (isobatch's own rule keeps batch-norm statistics equal) and with gradients as views
    of the buckets (no copy after the all-reduce).
    """
    # depthwise kernels (C, 1, k, k) have two descriptions of one and the same layout, which DDP takes for two layouts
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    for p in model.parameters():
        p.grad_dtype = p.dtype  # DDP's buckets have the weights' dtype, so half copies collect in half here
    wrapped = WatchedDDP(
        Participant(model),
        device_ids=None if device.type == "cpu" else [device],
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        bucket_cap_mb=EVERYTHING_MB if options.delay_allreduce else options.bucket_mb,
    )
    asked = options.find_unused_parameters
    wrapped.completion = Completion(model, ranks, says=asked == "auto") if asked is not False else None
    if options.reduce_dtype is not None or options.gradient_predivide is not None or not options.gradient_average:
        dtype = None if options.reduce_dtype is None else getattr(torch, options.reduce_dtype)
        all_ranks = float(ranks.world_size) if options.gradient_average else 1.0
        before = all_ranks if options.gradient_predivide is None else options.gradient_predivide
        state = dtype, before, all_ranks / before
        # a lambda, because torch checks annotations and cannot read those of a module with postponed evaluation
        wrapped.register_comm_hook(state, lambda state, bucket: mean_hook(state, bucket))
    return wrapped


def mean_hook(state: tuple[torch.dtype | None, float, float], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """apex's `allreduce_always_fp32` and `gradient_predivide_factor` as a communication hook.

    Args:
        state: (dtype to add in or None, divisor before the sum, divisor after it); the product of the divisors is the
            number of ranks, or 1 where the losses are not weighed up for that.
    """
    dtype, before, after = state
    buffer = bucket.buffer()
    wide = buffer.to(dtype or buffer.dtype)
    future = dist.all_reduce(wide if before == 1 else wide.div_(before), async_op=True).get_future()  # type: ignore[union-attr]

    def mean(done: torch.futures.Future[Any]) -> Tensor:
        total = done.value()[0]
        if after != 1:
            total.div_(after)
        return total if total is buffer else buffer.copy_(total)

    return future.then(mean)


class ShardedDataParallel(nn.DataParallel):  # type: ignore[type-arg]
    """DataParallel whose chunk i is the shards of device i: torch's own cut into equal chunks would mix unequal ones.

    Each replica computes under the autocast of the thread that asks (a thread has its own, and torch hands on whether
    there is one, but not its dtype), with its shards apart as there, and on running statistics of its own: torch gives the
    first replica the model's very buffers, which must not change between its forward and its backward.
    """

    lanes: Lanes

    def __init__(self, model: nn.Module, devices: list[torch.device]):
        if model._compiled_call_impl is not None:
            raise ConfigError("compile", True, "replicas of nn.DataParallel would run what was compiled for the first of them",
                              "set parallel=ddp or compile=false")  # fmt: skip
        super().__init__(model, device_ids=devices, output_device=devices[0])
        self.layers = learning_layers(model)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if len(self.lanes.layouts) == 1:
            return self.module(*inputs, **named)
        output = super().forward(*inputs, **named)
        self._average_statistics()
        return output

    def replicate(self, module: nn.Module, device_ids: Any) -> Any:
        copies = super().replicate(module, device_ids)
        self.statistics: list[Tensor] = []
        if self.layers:
            mine = torch.cat([b.reshape(-1) for b in self._buffers_of(self.layers)])
            for copy, device in zip(copies, device_ids, strict=True):
                self.statistics.append(mine.to(torch.device(self.src_device_obj.type, device), non_blocking=True))
                parts = iter(torch.split(self.statistics[-1], [b.numel() for b in self._buffers_of(self.layers)]))
                for layer in learning_layers(copy):
                    layer._buffers["running_mean"], layer._buffers["running_var"] = next(parts), next(parts)
        return copies

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        kind = self.src_device_obj.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        caches, apart = torch.is_autocast_cache_enabled(), entered()

        def under_autocast(replica: nn.Module) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=caches), apart:
                    return replica(*args, **kwargs)

            return forward

        return super().parallel_apply([under_autocast(replica) for replica in replicas], inputs, kwargs)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        leaves, form = tree_flatten((inputs, kwargs))
        count = len(self.lanes.layouts)
        places = self.lanes.chunks(torch.arange(self.lanes.samples))
        cut = [self.lanes.chunks(leaf) if isinstance(leaf, Tensor) else [leaf.at(part) for part in places] if isinstance(
            leaf, PerSample) else [leaf] * count for leaf in leaves]  # fmt: skip
        moved = [[part.to(device, non_blocking=True) if isinstance(part, Tensor) else part for part in parts]
                 for parts, device in zip(zip(*cut, strict=True), self.device_ids, strict=False)]  # fmt: skip
        each = [tree_unflatten(parts, form) for parts in moved]
        return tuple(args for args, _ in each), tuple(named for _, named in each)

    @staticmethod
    def _buffers_of(layers: Any) -> list[Tensor]:
        return [b for layer in layers for b in (layer.running_mean, layer.running_var)]

    @torch.no_grad()
    def _average_statistics(self) -> None:
        """Leave the mean over the shards in the model: torch would keep the statistics of the first replica alone."""
        if self.statistics:
            home = self.statistics[0].device
            found = torch.stack([flat.to(home, non_blocking=True) for flat in self.statistics])
            shards = [len(layout.sizes) for layout in self.lanes.layouts]
            if len(set(shards)) == 1:
                mean = found.mean(0)
            else:
                mean = sum(part * count for part, count in zip(found, shards, strict=True)) / sum(shards)
            mine = self._buffers_of(self.layers)
            parts = torch.split(mean, [b.numel() for b in mine])
            torch._foreach_copy_(mine, [part.view(b.shape) for part, b in zip(parts, mine, strict=True)])
