"""The training step: one window -> one update. Everything that varies comes in as a part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from isobatch.data.feed import MicroBatch, WindowData
from isobatch.precision.forward import forward
from isobatch.precision.masters import WorkingCopy
from isobatch.runtime.randomness import ShardSeeder
from isobatch.train.batch_norm import ShardStatistics
from isobatch.train.state import TrainState

if TYPE_CHECKING:
    from isobatch.clip.clipping import Clipping
    from isobatch.precision.levels import Full
    from isobatch.reduction.protocol import Reducer


class Criterion(Protocol):
    """(output in fp32, targets) -> 0-d loss, or what else given.py knows; timm's modules, users' functions."""

    def __call__(self, output: Any, targets: Any, /) -> Any: ...


def micro_step(state: TrainState, parts: Parts, step: int, micro: MicroBatch) -> Tensor:
    """Forward and backward of one micro batch: adds its gradients to the window's. Returns its weighted loss, 0-d."""
    parts.seed(step, micro.shards)
    parts.statistics.enter()
    with parts.apart(step, micro), parts.reducer.shard(micro):
        output = forward(parts.reducer.module, micro.inputs, parts.precision.autocast(parts.device))
        loss = parts.weigh(parts.criterion(output, micro.targets), micro.weight, micro.shards[0])
        parts.statistics.leave(micro, parts.reducer)  # before backward: checkpointing runs the forward again in there
        parts.reducer.record(micro, loss)
        if micro.is_first:
            parts.working.zero_grad(state.optimizer)  # this late: gradients and activations never coexist idly
        state.scaler.scale(times(loss, parts.reducer.loss_factor)).backward()
    return loss.detach()


def times(loss: Tensor, factor: float) -> Tensor:
    """loss * factor, without the two kernels that a factor of 1 would cost."""
    return loss if factor == 1.0 else loss * factor


def mean(loss: Tensor, weight: float, shard: int) -> Tensor:
    """A criterion's result as its part of the window's loss: that of a mean over samples."""
    return times(loss, weight)


@dataclass(slots=True)
class Parts:
    """What a step is made of, chosen by the config groups; none of it changes during a run."""

    criterion: Criterion
    reducer: Reducer
    precision: Full
    working: WorkingCopy
    statistics: ShardStatistics
    seed: ShardSeeder
    device: torch.device
    clip: Clipping
    apart: Callable[[int, MicroBatch], AbstractContextManager[None]] = lambda step, micro: nullcontext()
    micro_step: Callable[..., Tensor | None] = micro_step
    weigh: Callable[[Any, float, int], Tensor] = mean
    skip_nonfinite: bool = False


def train_step(state: TrainState, parts: Parts, data: WindowData, want_norm: bool = False) -> tuple[bool, Tensor | None]:
    """Run one window. Returns (update applied, gradient norm before clipping or None when nobody wants it)."""
    reducer, statistics, scaler, optimizer = parts.reducer, parts.statistics, state.scaler, state.optimizer
    statistics.begin()
    while True:
        reducer.begin(data.window, statistics.flat)
        for micro in data.micro_batches:
            parts.micro_step(state, parts, data.window.step, micro)
        if reducer.finish():  # now every rank holds the mean gradient over exactly the window's samples
            break
        statistics.rollback()
    if reducer.empty:
        statistics.rollback()
        return False, None

    parts.working.pull_gradients()
    scaler.unscale_(optimizer)  # once per window, before clipping: the norm is that of the true gradient
    norm = None
    if want_norm or parts.clip.active or parts.skip_nonfinite:
        norm = parts.clip(state)
    withhold = parts.skip_nonfinite and not torch.isfinite(norm).item()  # type: ignore[arg-type]
    parts.seed.update(data.window.step, optimizer)
    applied = scaler.step(optimizer, withhold)  # all ranks alike: they hold the same gradients
    if applied:
        parts.working.push_weights()
        statistics.commit(reducer)
        state.ema_update()
    else:
        statistics.rollback()
    return applied, norm
