"""Micro steps are recorded once as CUDA graphs and replayed, so that a small model's step is a few launches and not hundreds.

What is recorded reads and writes fixed memory: inputs and targets are copied in, the weight of the micro batch and the
loss scale are numbers on the device, gradients stay in place (gradients.py), the learning rate is a tensor while the update
is recorded. Dropout draws from the device's own generator, which torch hands to a recording: seeded by shard before each
replay, it draws what running would. Shapes that are rare (an epoch's tail) are run as always, into the same gradients.

A recording cannot know of decisions that Python makes, or of memory that moves. So the first replays of every shape are
compared with running the same micro batch; what differs ends the run with one line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree

from isobatch.errors import JobFailed, reason
from isobatch.given import Given, taken_apart
from isobatch.precision.forward import forward
from isobatch.reduction.elements import ByElements
from isobatch.train.gradients import Gradients
from isobatch.train.step import Parts, micro_step

if TYPE_CHECKING:
    from isobatch.data.feed import MicroBatch
    from isobatch.train.state import TrainState

WARM = 2  # windows that are run first: kernels are chosen, memory is laid out, momenta exist
SHAPES = 8  # that are recorded; more are run
CHECKED = 2  # replays of a shape that are compared with running
APART = 0.02  # of the gradient's norm: bf16 kernels that add with atomics stay far below, a wrong replay far above


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any, what: str) -> Iterator[None]:
    """Record what is done inside; nothing of it happens yet.

    Raises:
        JobFailed: something in it cannot be recorded.
    """
    try:
        # other threads (pinned memory, the process group's watchdog) may do what a recording must not
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    except (RuntimeError, NotImplementedError) as error:
        raise JobFailed(f"cuda_graph=true: {what} cannot be recorded ({reason(error)}); "
                        "set cuda_graph=false") from error  # fmt: skip


class Recorded:
    """A micro step of one shape: its fixed inputs and its result, and the graph between them."""

    def __init__(self, micro: MicroBatch):
        leaves, self.form = tree.tree_flatten((micro.inputs, micro.targets))
        self.held = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.inputs, self.targets = tree.tree_unflatten(self.held, self.form)
        device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        self.numbers = {name: torch.ones((), device=device) for name in ("weight", "scale")}
        self.said = dict.fromkeys(self.numbers, 1.0)
        self.loss = torch.zeros((), device=device)
        self.given: Given | None = None
        self.graph = torch.cuda.CUDAGraph()
        self.unchecked = CHECKED

    def load(self, micro: MicroBatch, weight: float, scale: float) -> None:
        """Bring `micro` into the fixed memory."""
        for held, leaf in zip(self.held, tree.tree_flatten((micro.inputs, micro.targets))[0], strict=True):
            if isinstance(held, Tensor):
                held.copy_(leaf)
        for name, value in (("weight", weight), ("scale", scale)):
            if self.said[name] != value:
                self.numbers[name].fill_(value)
                self.said[name] = value

    def work(self, parts: Parts) -> None:
        """What is recorded: micro_step's forward and backward, on fixed memory."""
        output = forward(parts.reducer.module, self.inputs, parts.precision.autocast(parts.device))
        self.given = taken_apart(parts.criterion(output, self.targets))  # of each replay, until the next one
        loss = self.given.value * self.numbers["weight"]
        self.loss.copy_(loss.detach())
        loss.backward(gradient=self.numbers["scale"].to(loss.dtype))


class MicroSteps:
    """Stands in for `micro_step`: runs the first windows, then records each shape and replays it."""

    def __init__(self, gradients: Gradients):
        self.gradients = gradients
        self.seen: Counter[Any] = Counter()
        self.recorded: dict[Any, Recorded] = {}
        self.first: int | None = None
        self.pool: Any = torch.cuda.graph_pool_handle()  # nothing outlives a replay there, so all graphs share it

    def __call__(self, state: TrainState, parts: Parts, step: int, micro: MicroBatch) -> Tensor:
        key = shape_of(micro)
        self.seen[key] += 1
        self.first = step if self.first is None else self.first
        recorded = self.recorded.get(key)
        if recorded is None:
            if step < self.first + WARM or self.seen[key] <= WARM or len(self.recorded) == SHAPES:
                return micro_step(state, parts, step, micro)
            recorded = self.recorded[key] = self._record(parts, step, micro)
        if recorded.unchecked:
            return self._compared(recorded, state, parts, step, micro)
        if micro.is_first:
            parts.working.zero_grad(state.optimizer)
        self._replay(recorded, state, parts, step, micro)
        if isinstance(parts.reducer, ByElements) and recorded.given is not None:
            count, named = tree.tree_map_only(Tensor, Tensor.clone, recorded.given[1:])
            parts.reducer.note(micro.shards[0], micro.weight, count, named)
        with parts.reducer.shard(micro):
            parts.statistics.leave(micro, parts.reducer)
            parts.reducer.record(micro, recorded.loss.clone())  # the next replay writes there
        return recorded.loss

    def _replay(self, recorded: Recorded, state: TrainState, parts: Parts, step: int, micro: MicroBatch) -> None:
        parts.seed(step, micro.shards)
        parts.statistics.enter()
        weight = parts.reducer.factor(micro.weight) if isinstance(parts.reducer, ByElements) else micro.weight
        recorded.load(micro, weight, state.scaler.get_scale())
        recorded.graph.replay()

    def _record(self, parts: Parts, step: int, micro: MicroBatch) -> Recorded:
        recorded = Recorded(micro)
        parts.seed(step, micro.shards)
        with parts.apart(step, micro), capture(recorded.graph, self.pool, "the model or the loss"):
            recorded.work(parts)
        return recorded

    def _compared(self, recorded: Recorded, state: TrainState, parts: Parts, step: int, micro: MicroBatch) -> Tensor:
        """Run the micro batch, replay it too, and compare; what running made is what counts.

        Raises:
            JobFailed: they differ.
        """
        if micro.is_first:
            parts.working.zero_grad(state.optimizer)
        before = self.gradients.values()
        loss = micro_step(state, parts, step, micro)
        ran, statistics = self.gradients.values(), self._statistics(parts)
        self.gradients.put(before)
        self._replay(recorded, state, parts, step, micro)
        replayed = self.gradients.values()
        self.gradients.put(ran)
        recorded.unchecked -= 1
        names = [f"loss {loss.item():.6g}, replayed {recorded.loss.item():.6g}"] if differ([loss], [recorded.loss]) else []
        for now in (ran, replayed):
            torch._foreach_sub_(now, before)  # what this micro batch added
        names += ["gradients"] * differ(ran, replayed)
        names += ["running statistics"] * differ(statistics, self._statistics(parts))
        if names:
            raise JobFailed(f"cuda_graph=true: at step {step + 1} replaying a micro step gave something else than running it "
                            f"({', '.join(names)}): the model or the loss decides or draws in Python, or keeps tensors of its "
                            "own; set cuda_graph=false")  # fmt: skip
        return loss

    def _statistics(self, parts: Parts) -> list[Tensor]:
        return [] if parts.statistics.flat is None else [parts.statistics.flat.clone()]


def shape_of(micro: MicroBatch) -> Any:
    """What two micro batches have in common that one recording can serve: all but the values of their tensors."""
    leaves, form = tree.tree_flatten((micro.inputs, micro.targets))
    return str(form), micro.lanes, tuple(
        (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    )  # fmt: skip


def differ(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether the two lists are apart by more than kernels that add in any order can be; not finite alike is no difference."""
    gap, size = 0.0, 0.0
    for one, other in zip(a, b, strict=True):
        finite = torch.isfinite(one)
        if not torch.equal(finite, torch.isfinite(other)):
            return True
        gap += torch.linalg.vector_norm(torch.where(finite, one - other, 0.0), dtype=torch.float64).item() ** 2
        size += torch.linalg.vector_norm(torch.where(finite, one, 0.0), dtype=torch.float64).item() ** 2
    return bool(gap**0.5 > APART * size**0.5 + 1e-9)
