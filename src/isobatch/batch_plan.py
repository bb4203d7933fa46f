"""The contract's integers: how an effective batch is cut into shards, and who computes which.

Pure integers, no torch, no environment: the same answer in every process, on every plan. A position is an index into
an epoch's order; everything here speaks of positions as `range`s, so that a shard costs nothing until it is read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from isobatch.errors import ConfigError


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@dataclass(frozen=True)
class Batch:
    """One effective batch on one hardware plan; `num_shards` is the contract's, the rest is the plan's.

    Two batches with the same `effective` and `shard` cut the same shards, whatever the other fields are.

    Args:
        shard: most samples that are trained as if alone.
        at_once: shards that a replica holds in one micro step.
        stated: the shard was stated and the micro batch is free; else the one follows from the other.
    """

    effective: int
    shard: int
    num_replicas: int
    at_once: int = 1
    stated: bool = False

    @cached_property
    def num_shards(self) -> int:
        return ceil_div(self.effective, self.shard)

    @property
    def largest(self) -> int:
        """Samples of the largest shard of a window: fewer than `shard` where the effective batch is no multiple."""
        return ceil_div(self.effective, self.num_shards)

    @property
    def micro(self) -> int:
        """Most samples that a replica holds in one micro step."""
        return min(self.at_once * self.shard, self.effective)

    @property
    def busiest(self) -> int:
        """Shards of the replica that has most."""
        return ceil_div(self.num_shards, self.num_replicas)

    @property
    def accumulation_steps(self) -> int:
        """Micro steps of the busiest replica in one window."""
        return ceil_div(self.busiest, self.at_once)

    def steps_with(self, replica: int, num_filled: int) -> int:
        """Micro steps of `replica` in a window of which only the first `num_filled` shards have samples."""
        return ceil_div(len(self.shards_of(replica, num_filled)), self.at_once)

    def on(self, num_replicas: int) -> Batch:
        """The same batch on so many replicas. Where no shard is stated, a replica gets no more than its part: cut anew."""
        if not self.stated:
            return Batch(self.effective, min(self.shard, ceil_div(self.effective, num_replicas)), num_replicas)
        return replace(self, num_replicas=num_replicas, at_once=min(self.at_once, ceil_div(self.num_shards, num_replicas)))

    def __str__(self) -> str:
        size = f"up to {self.largest}" if self.effective % self.num_shards else str(self.largest)
        uneven = self.at_once > 1 and (self.busiest % self.at_once or self.num_shards % self.num_replicas)
        most = "up to " if uneven else ""
        return (f"effective {self.effective} = {counted(self.num_shards, 'shard')} of {size}; "
                f"{counted(self.num_replicas, 'replica')} x {counted(self.accumulation_steps, 'micro step')} of "
                f"{most}{counted(self.at_once, 'shard')}")  # fmt: skip

    def shards_of(self, replica: int, num_filled: int | None = None) -> range:
        """The shards that `replica` computes, of all or of the first `num_filled`: contiguous, some replicas take one more.

        Contiguous, because the exact tree reduction then sends one partial sum per replica when V/R is a power of two.
        """
        return even_part(self.num_shards if num_filled is None else num_filled, self.num_replicas, replica)

    def micro_steps(self, replicas: range, lanes: int, num_filled: int | None = None) -> list[MicroStep]:
        """The shards that a process with these replicas runs in one window, micro step by micro step, lane by lane.

        With several lanes (a device for each replica of the process) a micro step holds the next shards of every
        replica; with one lane the replicas' shards follow each other.
        """
        mine = [self._steps_of(self.shards_of(replica, num_filled)) for replica in replicas]
        if lanes == 1:
            return [(shards,) for steps in mine for shards in steps]
        return [tuple(s[k] for s in mine if k < len(s)) for k in range(max(map(len, mine)))]

    def _steps_of(self, shards: range) -> list[tuple[int, ...]]:
        """`shards` in as few micro steps as `at_once` allows, as even as possible: 5 of at most 4 are 3 and 2."""
        steps, start = ceil_div(len(shards), self.at_once), shards.start
        return [tuple(start + i for i in even_part(len(shards), steps, step)) for step in range(steps)]


MicroStep = tuple[tuple[int, ...], ...]  # for each lane the shards that it runs in one forward


def even_part(count: int, parts: int, part: int) -> range:
    """Part `part` of 0 .. count-1 cut into `parts` contiguous ranges, the first count % parts of which have one more."""
    each, extra = divmod(count, parts)
    start = part * each + min(part, extra)
    return range(start, start + each + (part < extra))


def resolve_batch(effective: int | None, micro: int | None, accumulation: int | None, num_replicas: int,
                  shard: int | None = None) -> Batch:  # fmt: skip
    """Fill in what the user left open of effective = micro x replicas x accumulation.

    Args:
        effective: samples of one optimizer step; None = micro x replicas x accumulation (accumulation enlarges the batch).
        micro: most samples of one micro step; None = what follows from the other two.
        accumulation: micro steps of the busiest replica; None = what follows (1 when micro is open too). Where fewer hold as
            little at once (each holds at least a shard), there are fewer.
        shard: samples that are trained as if alone; None = the micro batch. A stated shard is never changed by the others:
            the micro batch is the largest multiple of it that `micro` has room for.
    Raises:
        ConfigError: effective and micro both open; all three given and inconsistent; a micro batch without room for a
            shard; a number below 1.
    """
    for key, value in (("batch.effective", effective), ("batch.shard", shard), ("batch.micro", micro),
                       ("accumulation.steps", accumulation)):  # fmt: skip
        if value is not None and value < 1:
            raise ConfigError(key, value, "must be a positive integer", f"set {key} to 1 or more, or null")
    if effective is None:
        if micro is None:
            raise ConfigError("batch.effective", None, "neither batch.effective nor batch.micro is given",
                              "give batch.effective (say 48), or batch.micro with accumulation")  # fmt: skip
        unit = shard or micro
        at_once = _room(micro, unit)
        held = at_once * unit * num_replicas
        return Batch(held * (accumulation or 1), unit, num_replicas, at_once, stated=shard is not None)
    if micro is not None and micro > effective:
        raise ConfigError("batch.micro", micro, f"is more than batch.effective={effective}",
                          f"set batch.micro={effective} or raise batch.effective")  # fmt: skip
    if shard is None:
        batch = Batch(effective, micro or ceil_div(effective, num_replicas * (accumulation or 1)), num_replicas)
    else:
        batch = _in_shards(effective, min(shard, effective), micro, accumulation, num_replicas)
    if micro is not None and accumulation not in (None, batch.accumulation_steps):
        raise ConfigError(
            "accumulation.steps", accumulation,
            f"batch.effective={effective} with batch.micro={micro} on {num_replicas} replica(s) takes "
            f"{batch.accumulation_steps} micro steps, not {accumulation}",
            f"set accumulation={batch.accumulation_steps} (or auto), or batch.micro=null",
        )  # fmt: skip
    return batch


def _in_shards(effective: int, shard: int, micro: int | None, accumulation: int | None, num_replicas: int) -> Batch:
    batch = Batch(effective, shard, num_replicas, stated=True)
    if micro is not None:
        return replace(batch, at_once=min(_room(micro, shard), batch.busiest))
    return replace(batch, at_once=ceil_div(batch.busiest, accumulation or 1))


def _room(micro: int, shard: int) -> int:
    """Shards that fit into a micro batch."""
    if micro < shard:
        raise ConfigError("batch.micro", micro, f"has no room for a shard of batch.shard={shard} samples",
                          f"set batch.micro={shard} or a multiple, or batch.shard={micro} (another training for batch norm "
                          "and all that draws), or batch.shard=null (the shard is then the micro batch)")  # fmt: skip
    return micro // shard


class Window(NamedTuple):
    """The positions of one optimizer step. `shard(v)` is `positions[v::V]`, in the tail window too."""

    step: int
    epoch: int
    positions: range
    num_shards: int

    @property
    def size(self) -> int:
        return len(self.positions)

    def shard(self, v: int) -> range:
        return self.positions[v :: self.num_shards]

    @property
    def num_filled(self) -> int:
        """Shards with at least one sample; the last shards of a small tail window are empty."""
        return min(self.num_shards, self.size)


class Since(NamedTuple):
    """Where these windows begin: after `step` steps with others, at a position of an epoch that those had begun."""

    step: int = 0
    epoch: int = 0
    position: int = 0


BEGINNING = Since()


@dataclass(frozen=True)
class BatchPlan:
    """A batch laid over epochs of `order_size` positions.

    Args:
        order_size: positions of one epoch's order, as the sampler states it.
        tail: `keep` the last window at its true size, `drop` it, or `pad` the order with its own first positions up
            to a multiple of the number of shards, as torch's DistributedSampler does.
        since: a run whose batch has changed goes on where its data stopped; the rest of that epoch has a tail of its own.
    """

    batch: Batch
    order_size: int
    tail: str = "keep"
    since: Since = BEGINNING

    def __post_init__(self) -> None:
        if self.order_size < 1:
            raise ConfigError("data.name", "", "the training set is empty", "point data.root at a folder with samples")
        if self.windows_per_epoch == 0:
            raise ConfigError(
                "sampler.tail", self.tail,
                f"one epoch has {self.order_size} samples, less than batch.effective={self.batch.effective}: nothing is left",
                "set sampler.tail=keep or lower batch.effective",
            )  # fmt: skip

    @cached_property
    def epoch_size(self) -> int:
        """Positions consumed in one epoch, after `tail`."""
        return self._consumed(0)

    def _consumed(self, position: int) -> int:
        """Positions consumed from `position` to the end of its epoch, after `tail`."""
        rest, effective, shards = max(0, self.order_size - position), self.batch.effective, self.batch.num_shards
        if self.tail == "drop":
            return rest - rest % effective
        if self.tail == "pad":
            return ceil_div(rest, shards) * shards
        return rest

    @cached_property
    def windows_per_epoch(self) -> int:
        return ceil_div(self.epoch_size, self.batch.effective)

    @property
    def tail_size(self) -> int:
        """Samples of the last window of an epoch (the effective batch when it divides the epoch)."""
        return self.epoch_size - (self.windows_per_epoch - 1) * self.batch.effective

    @property
    def smallest_tail(self) -> int:
        """Samples of the smallest last window: `tail_size`, or that of the epoch of `since`."""
        rest = self._consumed(self.since.position) % self.batch.effective
        return min(self.tail_size, rest or self.tail_size)

    @cached_property
    def end_of_first(self) -> int:
        """Where the epoch of `since` ends. May pass `epoch_size`, by less than the number of shards."""
        return self.since.position + self._consumed(self.since.position)

    @cached_property
    def ahead(self) -> int:
        """Steps that the run has made beyond those of a run with these windows from the start, when that epoch ends."""
        left = ceil_div(self._consumed(self.since.position), self.batch.effective)
        return self.since.step + left - (self.since.epoch + 1) * self.windows_per_epoch

    def window(self, step: int) -> Window:
        """The window of global step `step` (0-based, not before `since`). Positions may pass `order_size` under `tail=pad`:
        wrap them."""
        epoch, index = divmod(step - self.ahead, self.windows_per_epoch)
        start, end = index * self.batch.effective, self.epoch_size
        if epoch == self.since.epoch:
            start, end = self.since.position + (step - self.since.step) * self.batch.effective, self.end_of_first
        return Window(step, epoch, range(start, min(start + self.batch.effective, end)), self.batch.num_shards)

    def samples_before(self, step: int) -> int:
        """Samples of whole epochs and of the windows before `step`, from the start."""
        window = self.window(step)
        return window.epoch * self.epoch_size + window.positions.start

    def smallest_shard(self) -> int:
        """Samples of the smallest non-empty shard of any window (batch norm cannot use a shard of one)."""
        sizes = [self.smallest_tail] if self.windows_per_epoch == 1 else [self.batch.effective, self.smallest_tail]
        return min(max(1, size // self.batch.num_shards) for size in sizes)

    def as_dict(self) -> dict[str, int]:
        """The `plan` of plan.json and summary.json (the launcher adds `world_size`)."""
        batch = self.batch
        return {"effective_batch": batch.effective, "shard": batch.shard, "micro_batch": batch.micro,
                "num_replicas": batch.num_replicas, "accumulation_steps": batch.accumulation_steps,
                "num_shards": batch.num_shards}  # fmt: skip
