"""A reducer for criteria that give more than a mean over samples: sums over elements, and named numbers beside the loss.

It stands before any other one. Of sums, each shard's total is divided by the same power of two, about the elements that a
window has, which keeps half gradients in range and costs no rounding; the counts meet once the gradients have, and gradients
and loss are put right by one factor. Where no criterion asks for it, this is not there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobatch.errors import JobFailed
from isobatch.given import Sum, taken_apart
from isobatch.runtime.accelerator import widest

if TYPE_CHECKING:
    from isobatch.batch_plan import Batch, Window
    from isobatch.data.feed import MicroBatch
    from isobatch.given import Given
    from isobatch.reduction.protocol import Reducer
    from isobatch.runtime.distributed import Ranks


def in_front_of(reducer: Reducer, given: Given | None, samples: int, batch: Batch, ranks: Ranks,
                device: torch.device) -> Reducer:  # fmt: skip
    """`reducer`, or what `given` needs before it (None: nobody trains)."""
    if given is None or (given.elements is None and not given.named):
        return reducer
    return ByElements(reducer, given, samples, batch, ranks, device)


class ByElements:
    """A Reducer (protocol.py) in front of another one.

    Args:
        given: what the criterion gave in the rehearsal, for `samples` samples, the same on all ranks.
    """

    def __init__(self, inner: Reducer, given: Given, samples: int, batch: Batch, ranks: Ranks, device: torch.device):
        self.inner, self.ranks, self.device = inner, ranks, device
        self.module, self.loss_factor = inner.module, inner.loss_factor
        self.names = sorted(given.named)
        self.sums = given.elements is not None
        # from samples, seed and effective batch alone, so the same on every plan
        expected = float(given.elements) / samples * batch.effective if given.elements is not None else 1.0
        self.unit = 2.0 ** round(math.log2(max(expected, 1.0)))
        self.slots = batch.num_shards if self.sums else 0
        self.count = 1.0
        self.weighed: list[tuple[int, Tensor | float]] = []
        self.beside: list[tuple[int, dict[str, Any], float]] = []

    @property
    def replays(self) -> bool:
        return self.inner.replays

    @property
    def empty(self) -> bool:
        """Whether the window that has just been finished holds no element at all, so that there is nothing to update."""
        return self.sums and not self.count

    def begin(self, window: Window, statistics: Tensor | None) -> None:
        self.weighed, self.beside = [], []
        self.arriving: tuple[Tensor, Any] | None = None
        self.inner.begin(window, statistics)

    def shard(self, micro: MicroBatch) -> AbstractContextManager[Any]:
        return self.inner.shard(micro)

    @contextmanager
    def aside(self, micro: MicroBatch | None) -> Iterator[None]:
        noted, (self.weighed, self.beside) = (self.weighed, self.beside), ([], [])
        with self.inner.aside(micro):
            yield
        self.weighed, self.beside = noted

    def weigh(self, result: Any, weight: float, shard: int) -> Tensor:
        """A criterion's result as its part of the window's loss, 0-d.

        Args:
            weight: in the window, of a mean over samples. shard: the first one that it is of.
        Raises:
            JobFailed: it is of another kind than the first one was.
        """
        value, count, named = taken_apart(result)
        self.note(shard, weight, count, named)
        return value * self.factor(weight)

    def factor(self, weight: float) -> float:
        """What a criterion's value is multiplied with: a sum's does not depend on its weight among the samples."""
        return 1.0 / self.unit if self.sums else weight

    def note(self, shard: int, weight: float, count: Tensor | float | None, named: dict[str, Any]) -> None:
        """Keep what came beside a value; nothing is read or computed."""
        if (count is not None) != self.sums or sorted(named) != self.names:
            raise JobFailed(
                "the loss has to give the same kind for every shard; at first it gave "
                f"{_kind(self.sums, self.names)}, and now {_kind(count is not None, sorted(named))}"
            )
        if count is not None:
            self.weighed.append((shard, count.detach() if isinstance(count, Tensor) else count))
        if named:
            kept = {name: _detached(value) for name, value in named.items()}
            self.beside.append((shard, kept, weight))

    def record(self, micro: MicroBatch, weighted_loss: Tensor) -> None:
        self.inner.record(micro, weighted_loss)
        if micro.is_last and self.sums:
            self._send()

    def _send(self) -> None:
        """Start the counts' way to the host before the last backward: what then waits for them waits for no backward."""
        counts = [c for _, c in self.weighed if isinstance(c, Tensor)]
        if not counts:
            return
        flat = torch.stack([c.to(self.device, widest(self.device)).reshape(()) for c in counts])
        if self.device.type != "cuda":
            self.arriving = flat.cpu(), None
            return
        held = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        held.copy_(flat, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self.arriving = held, event

    def _counts(self) -> list[float]:
        """Elements of each shard of the window, over all ranks. A collective."""
        mine = torch.zeros(self.slots, dtype=torch.float64)
        arrived: list[float] = []
        if self.arriving is not None:
            held, event = self.arriving
            if event is not None:
                event.synchronize()
            arrived = held.tolist()
        values = iter(arrived)
        for shard, count in self.weighed:
            mine[shard] += next(values) if isinstance(count, Tensor) else float(count)
        return self.ranks.all_reduce(mine).tolist()  # each has a place of its own: no rounding, in no order

    def finish(self) -> bool:
        if not self.inner.finish():
            return False
        if self.sums:
            self.count = math.fsum(self._counts())
            if self.count and self.unit != self.count:
                gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
                if gradients:
                    with torch.no_grad():
                        torch._foreach_mul_(gradients, self.unit / self.count)
        return True

    def local_loss(self) -> Tensor | None:
        return self.inner.local_loss()

    def window_loss(self) -> Tensor:
        """Mean loss of the window, 0-d; of one without elements 0. A collective."""
        loss = self.inner.window_loss()
        if not self.sums:
            return loss
        return loss * (self.unit / self.count) if self.count else torch.zeros_like(loss)

    def named(self) -> dict[str, float]:
        """The window's mean of each named number. A collective; reads from the device."""
        if not self.names:
            return {}
        parts = torch.zeros(len(self.names), 2, dtype=widest(self.device), device=self.device)
        for _, values, weight in sorted(self.beside, key=lambda noted: noted[0]):  # lanes come in any order
            for i, name in enumerate(self.names):
                value = values[name]
                total, count = (value.total, value.count) if isinstance(value, Sum) else (value * weight, weight)
                parts[i, 0] += total
                parts[i, 1] += count
        found = self.ranks.all_reduce(parts).tolist()
        return {name: total / count for name, (total, count) in zip(self.names, found, strict=True) if count}

    def add_buffers(self, micro: MicroBatch, flat: Tensor) -> None:
        self.inner.add_buffers(micro, flat)

    def mean_buffers(self) -> Tensor:
        return self.inner.mean_buffers()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def _kind(is_sum: bool, names: list[str]) -> str:
    return ("an isobatch.Sum" if is_sum else "a mean") + (f" with {', '.join(names)}" if names else "")


def _detached(value: Any) -> Any:
    if isinstance(value, Sum):
        return Sum(_detached(value.total), _detached(value.count))
    return value.detach() if isinstance(value, Tensor) else value
