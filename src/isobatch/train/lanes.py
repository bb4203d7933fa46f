"""Several shards of one process at the same time, under `reduction=exact`: each in a lane, a thread or a stream (crews.py).

Equal bits need every kernel to see the shapes that it sees when a shard is alone, so a shard keeps its own forward and
backward, and its kernels keep to one thread; what runs at once are shards. They are handed to the reducer in their order, by
the thread (on the stream) that trains, so that nothing depends on which one was ready first.

Before the first window every lane runs the first shard, all at once, and has to give the bits that it gives alone (see
audit/repeat.py). A model that lanes cannot have for themselves runs one shard at a time, and a line says why.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.modules import module as modules
from torch.utils._pytree import tree_map_only

from isobatch.errors import JobFailed
from isobatch.train.crews import Crew
from isobatch.train.lane import Lane, Shard
from isobatch.train.step import micro_step
from isobatch.train.stream_lane import landed
from isobatch.train.unseen import WAY_OUT, Attributes, Buffers, GivenInputs, Shared

if TYPE_CHECKING:
    from torch.nn import Module

    from isobatch.audit.diagnosis import Diary
    from isobatch.data.feed import MicroBatch
    from isobatch.train.state import TrainState
    from isobatch.train.step import Parts

log = logging.getLogger("isobatch")


class LaneSteps:
    """Stands in for `micro_step`: returns as soon as a lane has the shard; at a window's last one, when the reducer has all.

    Args:
        crew: of at least two. seed: of the run. reducer: of the training; a micro step with any other one (an audit's, say) is
            run here and now.
        host: whether a forward may draw from Python's or NumPy's generator.
        asked: for so many at a time, whether it is faster or not.
    """

    def __init__(self, crew: Crew, seed: int, reducer: Any, host: bool, asked: bool):
        self.crew, self.count, self.seed, self.reducer, self.host, self.asked = crew, crew.count, seed, reducer, host, asked
        self.evaluated = -1  # step of the last evaluation before the lanes were made
        self.lanes: list[Lane] | None = []  # None: this model cannot have any
        self.free: SimpleQueue[Lane] = SimpleQueue()
        self.under_way: deque[tuple[MicroBatch, Future[Shard]]] = deque()
        self.window = ExitStack()

    def __call__(self, state: TrainState, parts: Parts, step: int, micro: MicroBatch) -> Tensor | None:
        if parts.reducer is not self.reducer or self.lanes is None:
            return micro_step(state, parts, step, micro)
        if micro.is_first:
            self._begin(state, parts)
        while len(self.under_way) >= self.crew.room:
            self._land(parts)
        self.under_way.append((micro, self.crew.submit(self._run, state, parts, step, micro)))
        while self.under_way and micro.is_last:
            self._land(parts)
        if micro.is_last:
            self._end(step)
        return None

    # -- a window --------------------------------------------------------------------------------------------------------
    def _begin(self, state: TrainState, parts: Parts) -> None:
        for lane in self._built(state, parts):
            lane.refresh(parts)
        parts.working.zero_grad(state.optimizer)
        self.shared = [*self.crew.shared(self.host), self._buffers(parts)]
        self.window.enter_context(self.crew.window())

    def _end(self, step: int) -> None:
        """
        Raises:
            JobFailed: something that lanes share has changed: the window's shards may have disturbed each other.
        """
        self.window.close()
        self.crew.rest()
        if problem := next(filter(None, (shared.changed() for shared in self.shared)), None):
            raise JobFailed(f"step {step + 1}: {self.count} shards run at once, and the model {problem}; go on from the last "
                            f"checkpoint and {WAY_OUT}")  # fmt: skip

    def _buffers(self, parts: Parts) -> Buffers:
        return Buffers(parts.working.module, *(lane.module for lane in self.lanes or ()))

    def _run(self, state: TrainState, parts: Parts, step: int, micro: MicroBatch) -> Shard:
        lane = self.free.get()
        try:
            return lane.run(state, parts, step, micro)
        finally:
            self.free.put(lane)

    def _land(self, parts: Parts) -> None:
        """Hand the oldest shard to the reducer, as if it had just been run."""
        micro, future = self.under_way.popleft()
        shard = landed(future.result())
        with parts.reducer.shard(micro):
            if shard.statistics is not None:
                parts.reducer.add_buffers(micro, shard.statistics)
            parts.reducer.record(micro, shard.loss)
            for parameter, gradient in zip(self.weights, shard.gradients, strict=True):
                parameter.grad = gradient

    def close(self) -> None:
        """The end of the crew's work, also in the middle of a window. Can be called twice."""
        self.under_way.clear()
        self.crew.close()
        self.window.close()

    # -- before the first one ------------------------------------------------------------------------------------------
    def _built(self, state: TrainState, parts: Parts) -> list[Lane]:
        if not self.lanes or (self.host and self.evaluated != state.evaluated):  # whose forwards may have left something
            self.evaluated, self.free = state.evaluated, SimpleQueue()
            self.weights = list(parts.working.module.parameters())
            self.lanes = list(self.crew.lanes(parts, self.seed))
            for lane in self.lanes:
                self.free.put(lane)
        return self.lanes

    def tried(self, state: TrainState, parts: Parts, step: int, micro: MicroBatch) -> tuple[list[Tried], str | None]:
        """The first shard in every lane, all at once: what each gives, and why this model cannot have lanes (None: nothing
        that can be seen here). The caller keeps and puts back what a forward changes."""
        if self.lanes is None:
            return [], None
        if any(table for name, table in vars(modules).items() if name.startswith("_global_") and isinstance(table, dict)):
            return [], "has hooks that are called for every module"
        parts.statistics.begin()
        try:
            lanes = self._built(state, parts)
            for lane in lanes:
                lane.refresh(parts)
            if (name := self.crew.cast_twice(lanes[0], parts, _copied(micro), self.host)) is not None:
                return [], f"uses {name} twice in a forward, under autocast"
            results, problem = self._all_at_once(lanes, state, parts, step, micro)
            if problem is None and (why := self._in_vain(lanes, state, parts, step, micro)) is not None:
                self._alone()
                log.info("one shard at a time: %s (threads=%d: %d at a time all the same)", why, self.count, self.count)
                return [], None
            return results, problem
        except Exception as error:  # of every kind: it is a model's own copy that fails
            return [], f"cannot be copied ({type(error).__name__}: {' '.join(str(error).split())[:100]})"
        finally:
            parts.statistics.rollback()

    def _all_at_once(self, lanes: list[Lane], state: TrainState, parts: Parts, step: int,
                     micro: MicroBatch) -> tuple[list[Tried], str | None]:  # fmt: skip
        own = [Attributes(lane.module, lane.criterion) for lane in lanes]
        copies = [_copied(micro) for _ in lanes]
        inputs = GivenInputs([(copy.inputs, copy.targets) for copy in copies])
        watched: Sequence[Shared] = [*self.crew.shared(True), self._buffers(parts), inputs, *own]
        with self.crew.window():
            futures = [self.crew.submit(lane.run, state, parts, step, copy)
                       for lane, copy in zip(lanes, copies, strict=True)]  # fmt: skip
            failed = next(filter(None, [future.exception() for future in futures]), None)  # waits for all
        if failed is not None:
            return [], f"fails {self.crew.where} ({type(failed).__name__}: {' '.join(str(failed).split())[:100]})"
        problem = next(filter(None, (one.changed() for one in watched)), None)
        return [Tried(lane, landed(future.result())) for lane, future in zip(lanes, futures, strict=True)], problem

    def _in_vain(self, lanes: list[Lane], state: TrainState, parts: Parts, step: int, micro: MicroBatch) -> str | None:
        """Why one at a time is as good, where nobody asked for more."""
        copy = _copied(micro)
        return None if self.asked else self.crew.in_vain(lambda lane: lane.run(state, parts, step, copy), lanes)

    def _alone(self) -> None:
        """From now on one shard at a time."""
        self.close()
        self.lanes = None

    def give_up(self, problem: str) -> None:
        """From now on one shard at a time, because of `problem`."""
        self._alone()
        log.warning("one shard at a time, not %d: the model %s", self.count, problem)


def _copied(micro: MicroBatch) -> MicroBatch:
    inputs, targets = tree_map_only(Tensor, Tensor.clone, (micro.inputs, micro.targets))
    return replace(micro, inputs=inputs, targets=targets)


class Tried:
    """What a lane made of a shard, by name, as audit/diagnosis.py compares it."""

    def __init__(self, lane: Lane, shard: Shard):
        self.working: Module = lane.module
        self.diary: Diary | None = None
        self.loss: Tensor | None = shard.loss.cpu()
        named = zip(lane.module.named_parameters(), shard.gradients, strict=True)
        self.gradients = {name: g.cpu() for (name, _), g in named if g is not None}
        self.buffers = {name: buffer.detach().cpu() for name, buffer in lane.module.named_buffers()}
