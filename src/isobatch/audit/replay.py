"""`audit=replay`: every N steps each rank computes a shard of another rank once more, before the update is applied.

Equal bits on every plan make that possible: a device that computes wrongly (silent data corruption) gives other bits than
one that does not. What is compared are digests of what the training itself got for that shard, its inputs, its loss, its
statistics and its gradients, with those of the second computation; and digests of the state that the window began with,
which every rank holds. The shard and the rank that computes it again rotate, so that all of them meet. One process has nobody
to ask but itself: it computes one of its own shards again.

A difference is judged by a third rank, or, where there is none, by both computing the shard again: a fault that passes is
right the next time. In a state, the majority of the ranks is right.
"""

from __future__ import annotations

import copy
import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobatch.audit import digest
from isobatch.audit.judge import Accusation, RankDigests, judge
from isobatch.audit.repeat import unchanged
from isobatch.audit.shard import EARLY, Aside, Round, ShardDigests
from isobatch.errors import JobFailed
from isobatch.runtime import accelerator

if TYPE_CHECKING:
    from isobatch.audit.watched import Node, Training
    from isobatch.batch_plan import Window
    from isobatch.data.feed import MicroBatch, WindowData
    from isobatch.train.state import TrainState
    from isobatch.train.step import Parts

log = logging.getLogger("isobatch")


class Audit:
    """Looks on while windows are trained; what reducers call is described in reduction/protocol.py (Observer).

    Args:
        generators: of the devices that shards run on, beside the CPU's.
        node: what this rank runs on: it can be taken out of an elastic launch.
    """

    def __init__(self, every: int, on_mismatch: str, training: Training, generators: list[torch.Generator],
                 node: Node):  # fmt: skip
        self.every, self.on_mismatch, self.generators, self.node = every, on_mismatch, generators, node
        self.training, self.ranks = training, training.ranks
        self.mine: ShardDigests | None = None  # of the shard that this rank's own training is watched at
        self.due: Round | None = None

    def __call__(self, state: TrainState, parts: Parts, windows: Iterator[WindowData]) -> Iterator[WindowData]:
        """`windows`, each of which is looked at when its number is due."""
        self.state, self.parts = state, parts
        self.reducer = reducer = exact(parts.reducer)
        self.dealt: Callable[[int], list[range]] = reducer.layouts.dealt
        names = {id(p): name for name, p in parts.working.module.named_parameters()}
        self.names = [names[id(p)] for p in reducer.parameters]
        reducer.observer, self.training.checkpointer.inspect = self, self.compare_states
        self.looked = False
        if self.on_mismatch == "exclude":
            self._warn_of_hindrances()
        for data in windows:
            step = data.window.step + 1
            if step % self.every == 0:
                self.due = Round(step // self.every - 1, data.window, self.dealt(data.window.num_filled))
                self.mine = ShardDigests(self.due.shard_of(self.ranks.rank), len(self.names))
                self.before = digest.StateDigest(self._held() if self.ranks.world_size > 1 else ())
                self.reducing = copy.deepcopy(state.reducer.state_dict()) if state.reducer is not None else {}
            yield data
            self.due = self.mine = None

    def _held(self) -> Iterator[tuple[str, Any]]:
        """What is the same on all ranks between two steps."""
        yield from digest.parts_of(self.state)
        if self.parts.working.pairs:
            yield from ((f"half.{name}", p) for name, p in self.parts.working.module.named_parameters())

    # -- the training's own computation ------------------------------------------------------------------------------
    def begins(self, micro: MicroBatch) -> None:
        if self.mine is not None and micro.shards[0] == self.mine.shard:
            self.mine.inputs(micro)

    def statistics(self, shard: int, flat: Tensor) -> None:
        if self.mine is not None and shard == self.mine.shard:
            self.mine.statistics(flat)

    def gradients(self, shard: int, ids: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        if self.mine is not None and shard == self.mine.shard:
            self.mine.gradients(ids, gradients)

    def finished(self) -> None:
        """The window's gradients are there, and the update is not yet made: now the other computation, and the comparison.

        Raises:
            JobFailed: on all ranks.
        """
        if not self.looked:
            self._look_at_buffers()
        if self.due is None or self.mine is None:
            return
        due, mine, rank, ranks = self.due, self.mine, self.ranks.rank, self.ranks.world_size
        self.mine = None  # what is computed from here on is nobody's training
        if mine.shard is not None:
            mine.loss(self.reducer.local_loss(), mine.shard)
        owner = due.owner_of(rank)
        again, order = self._compute(due.window, due.shard_of(owner))
        state, own = self.before.values(), mine.values()
        # three numbers of each rank: its state, its own shard, and the one that it has computed again
        table = torch.zeros(ranks, 3, dtype=torch.int64)
        table[rank] = torch.tensor([digest.of_plain(digests) for digests in (state, own, again)])
        table = self.ranks.all_reduce(table)
        if len(set(table[:, 0].tolist())) > 1:
            self._tell(due, self._judged_states(state))
            return
        for one in range(ranks):
            if due.shard_of(one) is not None and table[one, 1] != table[due.auditor_of(one), 2]:
                self._tell(due, self._judged(due, one, own, again, order))

    def _look_at_buffers(self) -> None:
        """After the first forwards: what every rank changes for itself cannot be compared.

        Raises:
            JobFailed: there is such a thing.
        """
        self.looked = True
        found = self.ranks.broadcast_object(self.parts.statistics.changed())
        if found:
            raise JobFailed(f"audit=replay cannot hold: the forward changes buffers that the contract has no rule for "
                            f"({', '.join(found[:3])}), so every rank keeps its own; set audit=none")  # fmt: skip

    # -- another computation ------------------------------------------------------------------------------------------
    def _compute(self, window: Window, shard: int | None) -> tuple[list[int], list[int]]:
        """Digests of one shard, and the numbers of the parameters in the order in which their gradients came."""
        found = ShardDigests(shard, len(self.names))
        if shard is None:
            return found.values(), []
        state, parts, step = self.state, self.parts, window.step
        reducer = self.reducer
        # whoever finishes a window need not want gradients of what he does
        with unchanged(state, parts, self.generators), torch.enable_grad():
            micro = self.training.feed.alone(window, shard)
            for parameter in reducer.parameters:
                parameter.grad = None
            found.inputs(micro)
            with parts.reducer.aside(micro):
                parts.micro_step(state, replace(parts, reducer=Aside(reducer, found)), step, micro)  # type: ignore[arg-type]
                order = list(reducer.arrived)
            found.gradients(range(len(self.names)), [p.grad for p in reducer.parameters])
        return found.values(), [len(EARLY) + i for i in order]

    def _judged(self, due: Round, owner: int, own: list[int], again: list[int], order: list[int]) -> Accusation | None:
        """Who is off in the shard of `owner`; on all ranks alike."""
        rank, shard, auditor = self.ranks.rank, due.shard_of(owner), due.auditor_of(owner)
        others = [r for r in range(self.ranks.world_size) if r not in (owner, auditor)]
        judges = others[:1] or [owner, auditor]  # one process computes it twice more
        results = [RankDigests(rank, tuple(own))] if rank == owner else []
        results += [RankDigests(rank, tuple(again))] if rank == auditor else []
        for one in judges:
            if rank == one:
                digests, order = self._compute(due.window, shard)
                results.append(RankDigests(rank, tuple(digests)))
        told = self.ranks.gather_objects((results, order))
        found = None
        if told is not None:
            every = [result for some, _ in told for result in some]
            early = list(range(len(EARLY)))
            suspects = judge(every, [*early, *next((order for _, order in told if order), [])])
            found = suspects and Accusation(suspects, f"of shard {shard}", self._named(suspects.apart))
        return self.ranks.broadcast_object(found)  # type: ignore[no-any-return]

    def _named(self, apart: Sequence[int]) -> str:
        """The first thing that differs, and the first gradient."""
        words = [EARLY[apart[0]]] if apart[0] < len(EARLY) else []
        gradient = next((i for i in apart if i >= len(EARLY)), None)
        if gradient is not None:
            name = self.names[gradient - len(EARLY)]
            kind = type(self.parts.working.module.get_submodule(name.rpartition(".")[0])).__name__
            words.append(f"the gradient of {name} ({kind})")
        return ", then in ".join(words)

    # -- the state ----------------------------------------------------------------------------------------------------
    def compare_states(self, state: TrainState) -> None:
        """Before a checkpoint: what is saved is what all ranks hold.

        Raises:
            JobFailed: on all ranks.
        """
        if self.ranks.world_size == 1:
            return
        found = digest.StateDigest(self._held())
        mine = found.values()
        table = torch.zeros(self.ranks.world_size, dtype=torch.int64)
        table[self.ranks.rank] = digest.of_plain(mine)
        if len(set(self.ranks.all_reduce(table).tolist())) > 1:
            self.before = found
            self._tell(None, self._judged_states(mine))

    def _judged_states(self, mine: list[int]) -> Accusation | None:
        told = self.ranks.gather_objects(RankDigests(self.ranks.rank, tuple(mine)))
        found = None
        if told is not None and (suspects := judge(told)):
            found = Accusation(suspects, "", self.before.names[suspects.apart[0]])
        return self.ranks.broadcast_object(found)  # type: ignore[no-any-return]

    # -- what becomes of it ---------------------------------------------------------------------------------------------
    def _tell(self, due: Round | None, found: Accusation | None) -> None:
        """On all ranks alike; `due` None: between steps.

        Raises:
            JobFailed: unless mismatches are to be warned of only.
        """
        if found is None:
            return
        here = {"host": platform.node(), "device": accelerator.name(self.parts.device)}
        places: Any = self.ranks.broadcast_object(self.ranks.gather_objects(here))
        line = found.line(self.state.step + 1, places)
        if self.on_mismatch == "warn":
            if self.ranks.is_main:
                log.warning("%s", line)
            return
        if self.on_mismatch == "exclude" and found.suspects.certain:
            line = f"{line}; {self._exclude(due, found)}"
        raise JobFailed(line)

    def _warn_of_hindrances(self) -> None:
        """Before training: what cannot be excluded."""
        for line in dict.fromkeys(self.ranks.gather_objects(self.node.hindrance()) or []):
            if line:
                log.warning("audit.on_mismatch=exclude: %s: if its bits are off, the run stops", line)

    def _exclude(self, due: Round | None, found: Accusation) -> str:
        """Leave a checkpoint that is right, and take the node out of the launch; returns what was done, in words."""
        checkpointer = self.training.checkpointer
        checkpointer.inspect = None
        if due is not None:
            self.parts.statistics.rollback()  # the window has not been: the state is that of the step before
            if self.state.reducer is not None:
                self.state.reducer.load_state_dict(self.reducing)
        if found.state and 0 in found.suspects.ranks:
            saved = "no checkpoint is saved of a state that is off on the main rank"
        else:
            checkpointer.save(self.state)
            checkpointer.wait()
            saved = f"step {self.state.step} is saved" if checkpointer.enabled else "checkpoint=none saves nothing"
        checkpointer.forbid()
        said = self.node.withdraw() if self.ranks.rank in found.suspects.ranks else ""
        told = self.ranks.broadcast_object(self.ranks.gather_objects(said))
        return f"{saved}; {next(words for words in told if words)}"


def exact(reducer: Any) -> Any:
    """The one that takes shards, behind those that stand in front of it."""
    while "inner" in vars(reducer):
        reducer = reducer.inner
    return reducer
