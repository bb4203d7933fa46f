"""What runs lanes at the same time: threads of one core on a CPU, streams on a CUDA device.

A stream needs no thread: the host hands out shard after shard, and each is queued behind what came before it on its own stream
alone. So all that happens on the host (seeds, Python's and NumPy's draws, autocast's cache of half weights) happens in the
order of one shard at a time. What has to be kept apart is memory: a stream waits for what it reads, and hands nothing back to
the allocator before those who read it have been waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch

from isobatch.runtime import accelerator
from isobatch.runtime.randomness import DRAWING, isolated_generators
from isobatch.shards.own import told_apart
from isobatch.train.lane import Lane, Shard, cast_twice
from isobatch.train.stream_lane import StreamLane
from isobatch.train.unseen import Generators, Shared

if TYPE_CHECKING:
    from isobatch.data.feed import MicroBatch
    from isobatch.train.step import Parts

QUICK_S = 0.003  # of a core: Python and the hand-over of a shard take a millisecond, and one thread at a time has Python
Prepare = Callable[..., Any]
GAIN = 1.03  # by the clock: less is what two measurements of the same differ by


class Crew(Protocol):
    """
    Attributes:
        where: a lane runs, for a person. count: of lanes. room: shards that may be under way.
    """

    where: str
    count: int
    room: int

    def lanes(self, parts: Parts, seed: int) -> Sequence[Lane]:
        """New ones, `count`."""

    def submit(self, work: Callable[..., Shard], *args: Any) -> Future[Shard]: ...

    def window(self) -> AbstractContextManager[None]:
        """Around the shards of a window."""

    def shared(self, host: bool) -> list[Shared]:
        """What a forward may not change, beside its model's own. `host`: it may draw from Python's or NumPy's generator."""

    def cast_twice(self, lane: Lane, parts: Parts, micro: MicroBatch, own: bool) -> str | None:
        """The weight for whose sake shards cannot run at the same time (see lane.py)."""

    def in_vain(self, run: Callable[[Lane], Shard], lanes: Sequence[Lane]) -> str | None:
        """Why one shard at a time is as fast, measured on one (`run`); None: it is slower."""

    def beside(self, prepare: Prepare | None) -> Prepare | None:
        """`prepare` of a Feed, which may be called while lanes run."""

    def rest(self) -> None:
        """Behind a window, whose shards have landed."""

    def close(self) -> None:
        """Also in the middle of a window. Can be called twice."""


class ThreadCrew:
    where = "in a thread"

    def __init__(self, count: int):
        self.count, self.room = count, count + 1  # one is ready for the first that is free
        self.pool: ThreadPoolExecutor | None = None

    def lanes(self, parts: Parts, seed: int) -> Sequence[Lane]:
        return [Lane(parts, seed) for _ in range(self.count)]

    def submit(self, work: Callable[..., Shard], *args: Any) -> Future[Shard]:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.count, "lane", lambda: torch.set_num_threads(1))
        return self.pool.submit(work, *args)

    def window(self) -> AbstractContextManager[None]:
        return told_apart()

    def shared(self, host: bool) -> list[Shared]:
        return [Generators(host)]

    def cast_twice(self, lane: Lane, parts: Parts, micro: MicroBatch, own: bool) -> str | None:
        return cast_twice(lane, parts, micro, own)

    def in_vain(self, run: Callable[[Lane], Shard], lanes: Sequence[Lane]) -> str | None:
        took = self.seconds(run, lanes[0])
        return f"it takes {1e3 * took:.1f} ms, too little for threads" if took < QUICK_S else None

    def seconds(self, run: Callable[[Lane], Shard], lane: Lane) -> float:
        """Of a core, for a shard that is run in this thread, once it has been run before; other programs hardly matter."""
        with told_apart():
            before = time.thread_time()
            run(lane)
            return time.thread_time() - before

    def beside(self, prepare: Prepare | None) -> Prepare | None:
        return undisturbed(prepare)

    def rest(self) -> None:
        """Threads keep nothing."""

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
            self.pool = None


class StreamCrew:
    where = "on a stream of its own"

    def __init__(self, count: int, device: torch.device):
        self.count = self.room = count
        self.device = device
        self.streams = [torch.cuda.Stream(device) for _ in range(count)]
        self.made: list[StreamLane] = []

    def lanes(self, parts: Parts, seed: int) -> Sequence[Lane]:
        self.made = [StreamLane(parts, seed, stream) for stream in self.streams]
        return self.made

    def submit(self, work: Callable[..., Shard], *args: Any) -> Future[Shard]:
        """Queued when this returns; what goes wrong is told when it lands, as ever."""
        done: Future[Shard] = Future()
        try:
            done.set_result(work(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def window(self) -> AbstractContextManager[None]:
        return nullcontext()

    def shared(self, host: bool) -> list[Shared]:
        return []  # generators are used in the order of one shard at a time

    def cast_twice(self, lane: Lane, parts: Parts, micro: MicroBatch, own: bool) -> str | None:
        return None  # the cache is emptied after each forward, as ever

    def in_vain(self, run: Callable[[Lane], Shard], lanes: Sequence[Lane]) -> str | None:
        one, several = self.seconds(run, [lanes[0]] * self.count), self.seconds(run, lanes)
        if one >= GAIN * several:
            return None
        return f"{self.count} take {1e3 * one:.1f} ms one after another and {1e3 * several:.1f} ms side by side"

    def seconds(self, run: Callable[[Lane], Shard], lanes: Sequence[Lane]) -> float:
        """By the clock, for a shard in each of `lanes` that has been run before."""
        accelerator.wait(self.device)
        before = time.perf_counter()
        for lane in lanes:
            run(lane)
        accelerator.wait(self.device)
        return time.perf_counter() - before

    def beside(self, prepare: Prepare | None) -> Prepare | None:
        return prepare  # the host is in one place at a time

    def rest(self) -> None:
        for lane in self.made:
            lane.let_go()

    def close(self) -> None:
        with suppress(Exception):  # the device may be what failed
            current = torch.cuda.current_stream(self.device)
            for stream in self.streams:
                current.wait_stream(stream)
            self.rest()


def crew_of(count: int, device: torch.device) -> Crew:
    """What runs `count` lanes on `device`."""
    return StreamCrew(count, device) if device.type == "cuda" else ThreadCrew(count)


def undisturbed(prepare: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """`prepare` of a Feed beside lanes: what it draws is drawn in peace, and the default generators stay as they were."""
    if prepare is None:
        return None

    def prepared(*given: Any) -> Any:
        with DRAWING, isolated_generators():
            return prepare(*given)

    return prepared
