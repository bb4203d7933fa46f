"""Does a shard give the same bits twice? Asked once, before the first update, where equal bits are promised.

Some kernels read memory that nobody wrote, some add in an order that changes from call to call, and some models draw from
generators of their own. Then equal weights cannot be had on any plan, and nothing in the training would show it. So the
first shard of the first window is run twice: the same weights, inputs, seeds and statistics, only free memory is left in
another state. Loss, gradients and buffers have to be equal to the bit.

Two runs of one shard are the price, once for each start. They go through the training's own micro step, with a reducer that
keeps what it gets; whatever they changed is put back, so a training is the same with and without the question.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from isobatch.audit.diagnosis import Diary, OddShard, compare, way_out
from isobatch.errors import JobFailed
from isobatch.runtime.distributed import Ranks
from isobatch.runtime.randomness import ShardSeeder, isolated_generators

if TYPE_CHECKING:
    from isobatch.data.feed import MicroBatch, WindowData
    from isobatch.train.lanes import LaneSteps
    from isobatch.train.state import TrainState
    from isobatch.train.step import Parts

log = logging.getLogger(__name__)

NAN, FINITE = 0xFF, 0x3F  # bytes: as numbers of any dtype not a number, and 0.75
PLAIN = bool, int, float, str, type(None)


@dataclass
class Repeat:
    """
    Args:
        promise: what would not hold, as the user asked for it (`reduction=exact`).
        tolerance: largest relative distance of two runs that is a warning only; 0 = to the bit.
        generators: of the devices that shards run on, beside the CPU's.
        lane_steps: what runs shards at the same time; None: nothing does.
    """

    promise: str
    ranks: Ranks
    tolerance: float = 0.0
    generators: list[torch.Generator] = field(default_factory=list)
    lane_steps: LaneSteps | None = None

    def __call__(self, state: TrainState, parts: Parts, windows: Iterator[WindowData]) -> Iterator[WindowData]:
        """`windows`, whose first one has been looked at. A collective.

        Raises:
            JobFailed: on all ranks, with the same line.
        """
        data = next(windows, None)
        if data is None:
            return windows
        first = next(rest := iter(data.micro_batches), None)
        if rest is data.micro_batches:  # an iterator: it is gone through once
            data.micro_batches = chain(() if first is None else (first,), rest)
        self._ask(state, parts, data, first)
        return chain((data,), windows)

    def _ask(self, state: TrainState, parts: Parts, data: WindowData, first: MicroBatch | None) -> None:
        one, two = (self._run(state, parts, data, first, byte) for byte in (NAN, FINITE))
        found = compare(one, two)
        if not self.ranks.agree(found is not None):
            if first is not None and self.lane_steps is not None:
                self._lanes(self.lane_steps, state, parts, data.window.step, first, one)
            return
        # a forward with all the hooks is a collective where weights are gathered: all ranks take part
        hooked = [self._run(state, parts, data, first, byte, Diary(parts.working.module)) for byte in (NAN, FINITE)]
        if found is not None:
            found = found.located(*hooked)
        told = self.ranks.gather_objects(found)
        line, apart = self.ranks.broadcast_object(told and self._verdict(told, data))
        if apart > self.tolerance:
            raise JobFailed(f"{line}: {way_out(parts.device)}")
        if self.ranks.is_main:
            log.warning("%s; sweep.tolerance allows as much", line)

    def _lanes(self, lanes: LaneSteps, state: TrainState, parts: Parts, step: int, first: MicroBatch,
               alone: KeptShard) -> None:  # fmt: skip
        """Shards that are run at once have the bits of one alone, or are run one at a time from now on (on this rank)."""
        with unchanged(state, parts, self.generators), parts.reducer.aside(first):
            results, problem = lanes.tried(state, parts, step, replace(first, is_first=True, is_last=True))
        for result in results:
            if problem is None and (found := compare(alone, result)) is not None:
                what = f"the gradient of {found.names[0]}" if not found.forward else (found.names or ["the loss"])[0]
                problem = f"gives other bits {lanes.crew.where}: {what}, {found.distance:.1g} apart"
        if problem is not None:
            lanes.give_up(problem)

    def _verdict(self, told: list[OddShard | None], data: WindowData) -> tuple[str, float]:
        """(line for a person, largest distance), of all that the ranks found."""
        rank, found = next((rank, found) for rank, found in enumerate(told) if found is not None)
        where = f" on rank {rank}" if self.ranks.world_size > 1 else ""
        line = (f"{self.promise} cannot hold: the first shard of step {data.window.step + 1}, run twice, gives two results"
                f"{where}; {found}")  # fmt: skip
        return line, max(found.distance for found in told if found is not None)

    def _run(self, state: TrainState, parts: Parts, data: WindowData, first: MicroBatch | None, byte: int,
             diary: Diary | None = None) -> KeptShard:  # fmt: skip
        """Loss, gradients and buffers of the first shard, after which everything is as before."""
        stir(parts.device, byte)
        with unchanged(state, parts, self.generators), parts.reducer.aside(first), diary or nullcontext():
            kept = KeptShard(parts, diary)
            if first is not None:
                inputs, targets = tree_map_only(Tensor, Tensor.clone, (first.inputs, first.targets))
                alone = replace(first, inputs=inputs, targets=targets, is_first=True, is_last=True)
                parts.statistics.begin()
                # the part of a Reducer that one shard needs
                parts.micro_step(state, replace(parts, reducer=kept), data.window.step, alone)  # type: ignore[arg-type]
                kept.finish()
                parts.statistics.rollback()
        return kept


class KeptShard:
    """Stands in for the reducer of one shard, and keeps what that shard gives."""

    def __init__(self, parts: Parts, diary: Diary | None):
        self.module, self.working, self.diary = parts.reducer.module, parts.working.module, diary
        self.loss_factor: float = parts.reducer.loss_factor
        self.loss: Tensor | None = None
        self.gradients: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}

    def shard(self, micro: MicroBatch) -> Any:
        return nullcontext()

    def record(self, micro: MicroBatch, weighted_loss: Tensor) -> None:
        self.loss = weighted_loss.detach().cpu()

    def add_buffers(self, micro: MicroBatch, flat: Tensor) -> None:
        """They are read off the model, with all others."""

    def finish(self) -> None:
        # on the CPU: on a device they would be beside the second run's activations
        for name, parameter in self.working.named_parameters():
            if parameter.grad is not None:
                self.gradients[name] = local(parameter.grad).cpu()
        self.buffers = {name: buffer.detach().cpu().clone() for name, buffer in self.working.named_buffers()}


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a spread tensor; any other as it is, dense."""
    tensor = tensor.detach()
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.to_dense() if part.layout != torch.strided else part


def stir(device: torch.device, byte: int) -> None:
    """Leave `byte` in free memory, in blocks of all sizes up to 2 MiB (16 MiB altogether)."""
    blocks = [torch.empty(2**size, dtype=torch.uint8, device=device) for size in range(6, 22) for _ in range(4)]
    for block in blocks:
        block.fill_(byte)


@contextmanager
def unchanged(state: TrainState, parts: Parts, generators: list[torch.Generator]) -> Iterator[None]:
    """Put back what a step changes: generators, buffers, gradients, and numbers that modules keep for themselves."""
    modules = [*parts.working.module.modules(), *(parts.criterion.modules() if isinstance(parts.criterion, nn.Module) else ())]
    buffers = [(m, dict(m._buffers), {k: (b.detach().clone(), b._version) for k, b in m._buffers.items() if b is not None})
               for m in modules]  # fmt: skip
    plain = [(m, {k: v for k, v in vars(m).items() if isinstance(v, PLAIN)}) for m in modules]
    gradients = [(p, p.grad) for p in {*parts.working.module.parameters(), *state.parameters}]
    seeds = [(generator, generator.get_state()) for generator in generators]
    with isolated_generators():
        yield
    for generator, seed in seeds:
        generator.set_state(seed)
    for parameter, gradient in gradients:
        parameter.grad = gradient
    with torch.no_grad():
        for module, own, values in buffers:
            for name in [name for name in module._buffers if name not in own]:
                del module._buffers[name]
            for name, buffer in own.items():
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
                if buffer is not None and buffer._version != values[name][1]:  # one that is constant stays so
                    buffer.copy_(values[name][0])
    for module, numbers in plain:
        for name, number in numbers.items():
            if vars(module).get(name, number) is not number:
                setattr(module, name, number)


def wanted(config: Any, ranks: Ranks, lanes: list[torch.device],
           lane_steps: LaneSteps | None = None) -> Callable[..., Iterator[WindowData]] | None:  # fmt: skip
    """The question where `config` promises equal bits, or a sweep compares its jobs; None where nobody counts on them."""
    generators = ShardSeeder(config.seed, lanes).all
    if config.reduction.exact or config.deterministic:
        promise = "reduction=exact" if config.reduction.exact else "deterministic=true"
        return Repeat(promise, ranks, 0.0, generators, lane_steps)
    if config.sweep.tolerance is not None:
        return Repeat(f"sweep.tolerance={config.sweep.tolerance:g}", ranks, config.sweep.tolerance, generators)
    return None
