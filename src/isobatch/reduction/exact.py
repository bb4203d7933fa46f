"""`reduction=exact`: a reducer of our own, whose sums are the same to the bit on every hardware plan.

A shard's gradients are taken from the parameters as soon as a bucket of them is complete, which is told by hooks during
its backward. In the last shard of a rank a complete bucket is sent off at once, so that the rest of backward hides the
way. All ranks do the same exchanges in the same order, whatever they have to add: buckets first to last, then one small
agreement about the whole window. `fast.py` describes a reducer's protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isobatch.errors import ConfigError, JobFailed
from isobatch.reduction.bin64 import BinSum, Units
from isobatch.reduction.buckets import make_bucket, make_buckets
from isobatch.reduction.exchange import Scratch
from isobatch.reduction.tree import Layouts, TreeSum
from isobatch.runtime.accelerator import widest
from isobatch.runtime.distributed import Ranks

if TYPE_CHECKING:
    from isobatch.batch_plan import BatchPlan, Window
    from isobatch.data.feed import MicroBatch
    from isobatch.precision.masters import WorkingCopy
    from isobatch.reduction import Exact
    from isobatch.reduction.protocol import Observer

UNDER_WAY = 2  # buckets whose exchange may be unfinished when the next one starts: bounds the memory for messages


def build(options: Exact, working: WorkingCopy, strategy: Any, plan: BatchPlan, ranks: Ranks,
          device: torch.device) -> ExactReducer:  # fmt: skip
    """The reducer that `options` describe.

    Raises:
        ConfigError: what no exact sum is offered for.
    """
    if len(strategy.lane_devices(device)) > 1:
        raise ConfigError("parallel.name", strategy.name, "nn.DataParallel adds gradients in the order of its devices, "
                          "which reduction=exact cannot promise anything about",
                          "set parallel=ddp (the weights do not depend on it) or reduction=fast")  # fmt: skip
    if any(isinstance(m, nn.SyncBatchNorm) for m in working.module.modules()):
        raise ConfigError("model.batch_norm", "sync", "sums its statistics in an order that depends on the plan",
                          "set model.batch_norm=shard or reduction=fast")  # fmt: skip
    if options.resolved_method(plan.batch.num_shards) == "bin64" and widest(device) != torch.float64:
        raise ConfigError("reduction.method", options.method, f"bin64 adds in float64, which {device.type} does not have",
                          "set reduction.method=tree or device=cpu")  # fmt: skip
    if any(p.is_complex() for p in working.module.parameters()):
        raise ConfigError("reduction.name", options.name, "has no sum for complex parameters", "set reduction=fast")
    return ExactReducer(options, working, strategy, plan, ranks, device)


class ExactReducer:
    """Sums of gradients, losses and buffers over a window's shards; see the module's docstring."""

    empty = False
    loss_factor = 1.0  # a shard's loss is weighted by its samples already: the window's gradient is the plain sum

    def __init__(self, options: Exact, working: WorkingCopy, strategy: Any, plan: BatchPlan, ranks: Ranks,
                 device: torch.device):  # fmt: skip
        batch = plan.batch
        self.ranks, self.device, self.module = ranks, device, working.module
        self.method = options.resolved_method(batch.num_shards)
        self.parameters = [p for p in working.module.parameters() if p.requires_grad and p.numel()]
        world = [strategy.local_replicas(Ranks(rank, ranks.world_size), device) for rank in range(ranks.world_size)]
        self.layouts = Layouts(lambda num_filled: [shards_of(plan, replicas, num_filled) for replicas in world], ranks.rank,
                               ranks.world_size)  # fmt: skip
        self.scratch = Scratch(UNDER_WAY)
        self.units = Units(len(self.parameters), batch.num_shards) if self.method == "bin64" else None
        self.buckets = make_buckets(self.parameters, options.bucket_mb * 2**20, ranks.world_size)
        self.sums = [self._sum(bucket, i) for i, bucket in enumerate(self.buckets)]
        self.losses = torch.zeros(batch.num_shards, dtype=widest(device), device=device)
        self.buffers: TreeSum | None = None
        self.sum_of_statistics: Tensor | None = None
        self.hooks = [
            self.parameters[i].register_post_accumulate_grad_hook(self._hook(b, i))
            for b, bucket in enumerate(self.buckets) for i in bucket.ids
        ]  # fmt: skip
        # the first window shows whether a parameter gets its gradient in several pieces within one backward
        self.early = False
        self.repeats = False
        self.last = False
        self.observer: Observer | None = None

    @property
    def replays(self) -> bool:
        """Whether a window may have to be run once more, so that its batches are kept."""
        return self.units is not None

    def _sum(self, bucket: Any, index: int) -> TreeSum | BinSum:
        if self.units is None:
            return TreeSum(bucket, index, self.layouts, self.scratch)
        return BinSum(bucket, index, self.ranks.rank, self.ranks.world_size, self.units, self.scratch)

    # -- a window ------------------------------------------------------------------------------------------------
    def begin(self, window: Window, statistics: Tensor | None) -> None:
        self.window = window
        self.current = -1  # the shard that runs; none yet
        self.touched = [False] * len(self.parameters)
        self.started = 0
        self.losses = torch.zeros_like(self.losses)  # the loop may still hold the last window's
        for parameter in self.parameters:
            parameter.grad = None  # its memory is ours, and is about to be used again
        for part in self.sums:
            part.begin(window.num_filled)
        if statistics is not None and self.buffers is None:  # few: the tree serves both methods
            self.buffers = TreeSum(make_bucket([0], [statistics], self.ranks.world_size), 0, self.layouts, Scratch())
        if self.buffers is not None:
            self.buffers.begin(window.num_filled)

    @contextmanager
    def shard(self, micro: MicroBatch) -> Iterator[None]:
        """Around forward and backward of one shard."""
        self.current = micro.shards[0]
        self.last = micro.is_last
        self.missing = [len(bucket.ids) for bucket in self.buckets]
        self.taken = [False] * len(self.buckets)
        self.arrived: dict[int, None] = {}  # in the order of their arrival
        if self.observer is not None:
            self.observer.begins(micro)
        yield
        for b, taken in enumerate(self.taken):
            if not taken:
                self._take(b)

    @contextmanager
    def aside(self, micro: MicroBatch | None) -> Iterator[None]:
        """Around a shard of no window: its gradients stay with the parameters, and nothing is noted."""
        self.missing, self.arrived = [len(bucket.ids) for bucket in self.buckets], {}
        noted, (self.early, self.repeats) = (self.early, self.repeats), (False, False)
        yield
        self.early, self.repeats = noted  # what the hooks saw is for a window to show

    def _hook(self, b: int, i: int) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if i in self.arrived:
                self._arrived_again(i)
            self.arrived[i] = None
            self.missing[b] -= 1
            if self.early and self.missing[b] == 0:
                self._take(b)

        return arrived

    def _arrived_again(self, i: int) -> None:
        self.repeats = True
        if self.early:
            names = {id(p): name for name, p in self.module.named_parameters()}
            raise JobFailed(f"parameter {names[id(self.parameters[i])]} got its gradient in several pieces in one backward, "
                            "but not so in the first window; use activation checkpointing with use_reentrant=False, or "
                            "reduction=fast")  # fmt: skip

    def _take(self, b: int) -> None:
        """Move the bucket's gradients from the parameters into its sum; send it off if this was the last of them."""
        gradients = []
        for i in self.buckets[b].ids:
            parameter = self.parameters[i]
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                self.touched[i] = True
                gradient = gradient.to_dense() if gradient.layout != torch.strided else gradient
            gradients.append(gradient)
        if self.observer is not None:
            self.observer.gradients(self.current, self.buckets[b].ids, gradients)
        self.sums[b].leaf(self.current, gradients)
        self.taken[b] = True
        if self.last:
            while self.started < len(self.buckets) and self.taken[self.started]:
                self._start()

    def _start(self) -> None:
        """Start the exchange of the next bucket; the order of all exchanges is the same on all ranks."""
        self.sums[self.started].launch()
        self.started += 1
        if self.started >= UNDER_WAY:
            self.sums[self.started - UNDER_WAY].reduce()

    def finish(self) -> bool:
        """Every parameter's gradient is the sum over the window's shards, or None where no shard had one.

        False = run the window once more (decided by all ranks together).
        """
        self.early = self.current >= 0 and not self.repeats
        if self.current < 0:
            self._send_buffers()
        while self.started < len(self.buckets):
            self._start()
        for part in self.sums[max(0, len(self.sums) - UNDER_WAY + 1) :]:
            part.reduce()
        if self.buffers is not None:
            self.buffers.reduce()
        largest = self._agree()
        accepted = self.units is None or self.units.check(largest)
        if self.buffers is not None:
            (self.sum_of_statistics,) = self.buffers.result()
        results = [part.result() for part in self.sums]  # waits for what is under way, also if it is of no use
        if not accepted:
            return False
        for bucket, values in zip(self.buckets, results, strict=True):
            for i, value in zip(bucket.ids, values, strict=True):
                parameter = self.parameters[i]
                # a half parameter with a master holds an fp32 gradient, which is handed to the master as it is
                dtype = parameter.grad_dtype or parameter.dtype
                parameter.grad = None if value is None or largest[i] < 0 else value.to(dtype)
        if self.observer is not None:
            self.observer.finished()
        return True

    def _agree(self) -> list[float]:
        """Of each parameter, over all ranks: -1 without a gradient, else bin64's largest magnitude (infinite for a NaN).

        Through main memory, so that `tree` does not wait for an accelerator; `bin64` has to, once.
        """
        mine = torch.tensor(self.touched, dtype=torch.float64).sub_(1.0)
        if self.units is not None:
            found = torch.cat([part.largest for part in self.sums if isinstance(part, BinSum)]).cpu()
            mine[[i for bucket in self.buckets for i in bucket.ids]] = found.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        return self.ranks.all_reduce(mine, "max").tolist()

    # -- losses and buffers --------------------------------------------------------------------------------------
    def record(self, micro: MicroBatch, weighted_loss: Tensor) -> None:
        """`weighted_loss`: 0-d, the shard's loss times its weight in the window."""
        self.losses[self.current] = weighted_loss.detach()

    def local_loss(self) -> Tensor:
        """The losses of this rank's shards, each at its number among (V,); zero for all others."""
        return self.losses

    def window_loss(self) -> Tensor:
        """Mean loss of the window, 0-d (a collective): every shard has a place of its own, all others add zero."""
        return self.ranks.all_reduce(self.losses.clone()).sum()

    def named(self) -> dict[str, float]:
        return {}

    def add_buffers(self, micro: MicroBatch, flat: Tensor) -> None:
        """Take what a shard's forward made of the running statistics, `flat` (n,)."""
        if self.observer is not None:
            self.observer.statistics(self.current, flat)
        assert self.buffers is not None
        self.buffers.leaf(self.current, [flat.clone()])
        if self.last:
            self._send_buffers()

    def _send_buffers(self) -> None:
        """Before the first bucket, so that the way is hidden by the last shard's backward."""
        if self.buffers is not None:
            self.buffers.launch()

    def mean_buffers(self) -> Tensor:
        """Mean of the statistics over the window's filled shards, (n,)."""
        assert self.sum_of_statistics is not None
        return self.sum_of_statistics / self.window.num_filled

    # -- checkpoints ---------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """bin64's exponents: without them a resumed run might round the first window otherwise."""
        return {} if self.units is None else {"exponents": list(self.units.exponents)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A state saved by another method (or reduction) is no state: the first window finds the units anew."""
        if self.units is not None and len(state.get("exponents", ())) == len(self.units.exponents):
            self.units.exponents = list(state["exponents"])


def shards_of(plan: BatchPlan, replicas: range, num_filled: int) -> range:
    """The shards that a process with these replicas runs in such a window, in the order in which it runs them: contiguous."""
    steps = [shard for (shards,) in plan.batch.micro_steps(replicas, 1, num_filled) for shard in shards]
    return range(steps[0], steps[-1] + 1) if steps else range(0)
