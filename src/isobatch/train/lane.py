"""A lane: what one shard needs to be run beside others, in a thread, with the bits that it has when it is run alone
(stream_lane.py: on a stream).

Module objects of its own over the very weights: parameters that share the model's memory and collect gradients for
themselves, and running statistics of their own. A generator of its own, seeded as the default one is for a shard. Buffers that
nobody changes are the model's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from isobatch.precision.masters import WorkingCopy
from isobatch.runtime.randomness import seed_of
from isobatch.runtime.trees import call
from isobatch.shards.own import Own
from isobatch.train.batch_norm import ShardStatistics, learning_layers
from isobatch.train.step import micro_step
from isobatch.train.unseen import TABLES, Reached

if TYPE_CHECKING:
    from isobatch.data.feed import MicroBatch
    from isobatch.precision.levels import Full
    from isobatch.train.state import TrainState
    from isobatch.train.step import Parts


class Shard(NamedTuple):
    """What a lane makes of one: weighted loss, 0-d; running statistics (n,), None where there are none; the gradients, in the
    order of the model's parameters, dense. `done`: the event behind its work, where that is on a stream of its own."""

    loss: Tensor
    statistics: Tensor | None
    gradients: list[Tensor | None]
    done: Any = None


class Lane:
    """
    Args:
        parts: of the training; nothing of it is changed. seed: of the run.

    Raises:
        Exception: of any kind: the model cannot be copied.
    """

    def __init__(self, parts: Parts, seed: int):
        model, self.seed = parts.working.module, seed
        self.weights = list(model.parameters())
        self.own = [nn.Parameter(p.detach(), p.requires_grad) for p in self.weights]
        for p, mine in zip(self.weights, self.own, strict=True):
            if p.grad_dtype not in (None, p.dtype):
                mine.grad_dtype = p.grad_dtype  # half weights that collect in fp32
        counted = {id(b) for layer in learning_layers(model) for b in layer.buffers(recurse=False)}
        memo: dict[int, Any] = {id(p): mine for p, mine in zip(self.weights, self.own, strict=True)}
        memo |= {id(b): b for b in model.buffers() if id(b) not in counted}
        memo |= {id(t): t for t in kept(model) + kept(parts.criterion) if id(t) not in memo.keys() | counted}
        self.module = copy.deepcopy(model, memo)
        self.criterion = copy.deepcopy(parts.criterion, memo)
        self.statistics = ShardStatistics(self.module)
        self.draws = Own()

    def refresh(self, parts: Parts) -> None:
        """Before a window: the weights and statistics are as the model has them now."""
        if self.statistics.flat is not None:
            self.statistics.base, self.statistics.base_counts = parts.statistics.base, parts.statistics.base_counts
        for p, mine in zip(self.weights, self.own, strict=True):
            if mine.data_ptr() != p.data_ptr():
                mine.data = p.detach()
            if mine.requires_grad != p.requires_grad:
                mine.requires_grad_(p.requires_grad)

    def run(self, state: TrainState, parts: Parts, step: int, micro: MicroBatch) -> Shard:
        """Forward and backward of one shard, in the thread that calls."""
        caught: Any = Caught(parts, self.module)
        mine = replace(parts, criterion=self.criterion, statistics=self.statistics, working=Untouched(), reducer=caught,
                       **self._parts(parts))  # fmt: skip
        micro_step(state, mine, step, micro)
        gradients = [p.grad if p.grad is None or p.grad.layout == torch.strided else p.grad.to_dense() for p in self.own]
        for p in self.own:
            p.grad = None
        assert caught.loss is not None
        return Shard(caught.loss, caught.statistics, gradients)

    def _parts(self, parts: Parts) -> dict[str, Any]:
        """Those that are a thread's own, beside the model."""
        return {"apart": self._apart, "seed": self._seed, "precision": Uncached(parts.precision)}

    def _seed(self, step: int, shards: tuple[int, ...]) -> None:
        self.draws.generator.manual_seed(seed_of("shard", self.seed, step, shards[0]))

    @contextmanager
    def _apart(self, step: int, micro: MicroBatch) -> Iterator[None]:
        with self.draws.drawing():
            yield


def kept(whole: Any) -> list[Tensor]:
    """Tensors in the attributes of a model or a criterion, which nobody changes and which may be views of its weights."""
    parts = whole.modules() if isinstance(whole, nn.Module) else [whole]
    held = [value for part in parts for key, value in getattr(part, "__dict__", {}).items() if key not in TABLES]
    return [tensor for tensor in Reached(held).tensors if not tensor.requires_grad]


class Caught:
    """Stands in for the reducer of one shard, and keeps what that shard gives."""

    def __init__(self, parts: Parts, module: nn.Module):
        self.module, self.loss_factor = module, parts.reducer.loss_factor
        self.loss: Tensor | None = None
        self.statistics: Tensor | None = None

    def shard(self, micro: MicroBatch) -> Any:
        return nullcontext()

    def record(self, micro: MicroBatch, weighted_loss: Tensor) -> None:
        self.loss = weighted_loss.detach()

    def add_buffers(self, micro: MicroBatch, flat: Tensor) -> None:
        self.statistics = flat.clone()


class Untouched(WorkingCopy):
    """The model's own gradients are nobody's business in a lane."""

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """A lane's are gone as soon as they are handed over."""


class Uncached:
    """`precision` whose autocast keeps no half weights: torch has one cache of them for all threads, and whoever leaves his
    forward first empties it."""

    def __init__(self, precision: Full):
        self.precision = precision

    @contextmanager
    def autocast(self, device: torch.device) -> Iterator[None]:
        with self.precision.autocast(device):
            before = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(before)


def cast_twice(lane: Lane, parts: Parts, micro: MicroBatch, own: bool) -> str | None:
    """A weight that autocast makes half more than once in a forward; None: there is none. With its half kept over the forward
    its gradients are added in half, without in fp32, so its bits depend on the cache that lanes cannot have. `own`:
    code of somebody's own runs in it, which may hold an autocast."""
    with parts.precision.autocast(parts.device):
        if not (own or (torch.is_autocast_enabled(parts.device.type) and torch.is_autocast_cache_enabled())):
            return None
    counted = Casts(lane.own)
    lane._seed(0, micro.shards)
    lane.statistics.enter()
    with lane.draws.drawing(), counted, Uncached(parts.precision).autocast(parts.device):
        call(lane.module, micro.inputs)
    names = {id(p): name for name, p in lane.module.named_parameters()}
    return next((names[key] for key, count in counted.found.items() if count > 1), None)


class Casts(TorchDispatchMode):
    """How often each of `weights` is copied to another type."""

    def __init__(self, weights: list[nn.Parameter]):
        super().__init__()
        self.found = dict.fromkeys(map(id, weights), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:  # fmt: skip
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self.found:
            self.found[id(args[0])] += 1
        return func(*args, **(kwargs or {}))
