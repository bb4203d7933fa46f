"""From the batch plan to tensors on the device: which samples this process reads for each window, in which order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from isobatch.batch_plan import BatchPlan, Window
from isobatch.data import Split
from isobatch.data.device import SideStream, ToDevice
from isobatch.data.loader import WorkerSource, choose_workers
from isobatch.data.places import MicroSteps, Places
from isobatch.data.samples import Request, Samples, ignored_by
from isobatch.permutation import ComputedOrder
from isobatch.runtime import accelerator
from isobatch.runtime.distributed import Ranks
from isobatch.runtime.randomness import isolated_generators
from isobatch.runtime.trees import Tree, first, mapped
from isobatch.shards.layout import Lanes, Layout

SPAN = 64, 2**16  # windows, and samples, that are cut in one go: for one alone that takes a sixth of a small model's step


@dataclass(slots=True)
class MicroBatch:
    """One forward and backward of this process.

    Args:
        shards: the shards it holds, device after device; lanes: how they lie in it.
        inputs, targets: trees of tensors (N, ...) on the device, N the samples of `lanes`.
        weight: of its loss in the window: the sum over all micro batches of all replicas is 1.
        is_first, is_last: within this process's part of the window.
    """

    shards: tuple[int, ...]
    lanes: Lanes
    inputs: Tree
    targets: Tree
    weight: float
    is_first: bool
    is_last: bool


@dataclass(slots=True)
class WindowData:
    """One window as this process sees it; `micro_batches` can be gone through once (an iterator) or as often as wanted."""

    window: Window
    micro_batches: Any


Again = Callable[[], tuple[Tensor, Tensor]]


class Source(Protocol):
    """Turns requests into (inputs, targets) on the device, in order.

    `reads_on`: where it looks at a request's indices. `keep` is given, for each batch before it is yielded, what makes it
    once more.
    """

    reads_on: torch.device

    def batches(self, requests: Iterator[Request], keep: Callable[[Again], Any] | None = None) -> Iterator[
        tuple[Tensor, Tensor]]: ...  # fmt: skip

    def aside(self) -> Source:
        """One that reads the same in this process, whatever this one is in the middle of."""

    def close(self) -> None: ...


class TensorSource:
    """A split that lives in the device's memory: a batch is two gathers, no worker, no copy."""

    def __init__(self, tensors: tuple[Tensor, Tensor], to_device: ToDevice):
        device = to_device.device
        self.inputs, self.targets = (t.to(device) for t in tensors)
        self.device, self.size = device, len(self.targets)
        self.reads_on = device
        self.normalized = to_device.normalized if to_device.changes(self.inputs) else None

    def batches(self, requests: Iterator[Request], keep: Callable[[Again], Any] | None = None) -> Iterator[
            tuple[Tensor, Tensor]]:  # fmt: skip
        for request in requests:
            if keep is not None:
                keep(partial(self.batch, request))
            yield self.batch(request)

    def batch(self, request: Request) -> tuple[Tensor, Tensor]:
        index = request.indices if request.highest < self.size else request.indices % self.size
        if index.device != self.device:
            index = index.to(self.device, non_blocking=True)
        inputs = self.inputs.index_select(0, index)
        return inputs if self.normalized is None else self.normalized(inputs), self.targets.index_select(0, index)

    def aside(self) -> Source:
        return self

    def close(self) -> None:
        """Nothing runs."""


def make_source(split: Split, device: torch.device, config: Any, channels_last: bool, ranks: Ranks,
                training: bool = False, side: SideStream | None = None) -> Source:  # fmt: skip
    """In-memory splits are indexed on the device, unless workers are asked for; the others are read by workers."""
    options = config.data
    to_device = ToDevice(device, split.info, channels_last, side)
    workers = options.num_workers or 0
    if split.tensors is None:
        workers = choose_workers(options.num_workers, split.light, device.type != "cpu", ranks.local_world_size)
    if split.tensors is not None and not workers:
        return TensorSource(split.tensors, to_device)
    pin = getattr(options, "pin_memory", None)
    pin = device.type not in ("cpu", "mps") if pin is None else pin  # MPS shares the host's memory
    return WorkerSource(
        Samples(split, config.seed, training and getattr(options, "on_error", "stop") == "replace",
                ignored_by(config.loss.build())), to_device, workers,
        getattr(options, "persistent_workers", True), getattr(options, "prefetch", 2), pin,
    )  # fmt: skip


def example(split: Split, seed: int, device: torch.device, channels_last: bool,
            prepare: Callable[..., tuple[Tensor, Tensor]] | None) -> Tree:  # fmt: skip
    """(2, ...): the first sample twice, as a training forward gets it. No generator notices."""
    with isolated_generators():
        source = WorkerSource(Samples(split, seed), ToDevice(device, split.info, channels_last))
        inputs, targets = next(source.batches(iter([Request(0, torch.tensor([0, 0]))])))
        return prepare(inputs, targets, 0, (0,), Lanes.alone((2,)))[0] if prepare is not None else inputs


class Feed:
    """Windows of the training set for the replicas of this process.

    Args:
        order: epoch -> virtual indices (order_size,) int64 on the CPU (see sampler.py).
        size: of the dataset; a virtual index is sample + size * occurrence.
        averages: the loss is a mean over samples (its weight is n_shard / n_window), else a sum (1 / num_shards).
        prepare: last touch on the device for a micro batch (mixup): (inputs, targets, step, shards, lanes) -> both.
        keep: a window can be gone through more than once (its batches stay in main memory, as they were read).
        interleaved: how several shards of one forward lie in its batch (see shards/layout.py).

    Attributes:
        waited: seconds so far that this process has waited for data.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        order: Callable[[int], Tensor | ComputedOrder],
        replicas: range,
        lanes: int,
        averages: bool = True,
        prepare: Callable[..., tuple[Tensor, Tensor]] | None = None,
        keep: bool = False,
        interleaved: bool = True,
    ):
        self.waited = 0.0
        self.source, self.plan, self.averages, self.prepare, self.keep = source, plan, averages, prepare, keep
        self.replicas, self.lanes, self.interleaved = replicas, lanes, interleaved
        self.cut = lru_cache(maxsize=4)(self._cut)
        self.places = lru_cache(maxsize=4)(lambda size: Places(self.cut(size), size, plan.batch.num_shards))
        self.span = lru_cache(maxsize=2)(self._span)  # without workers it is asked for its samples, then for its batches
        self.order = lru_cache(maxsize=2)(lambda epoch: self._padded(order(epoch)))
        self.highest = lru_cache(maxsize=2)(lambda epoch: int(self.order(epoch).max()))
        # of data that live on the device: once an epoch, where a copy for each micro step would be a launch and a wait
        self.sent = lru_cache(maxsize=2)(self._sent)

    def _sent(self, epoch: int) -> Tensor | ComputedOrder:
        order = self.order(epoch)
        return accelerator.sent(order, self.source.reads_on) if isinstance(order, Tensor) else order

    def _padded(self, order: Tensor | ComputedOrder) -> Tensor | ComputedOrder:
        """`tail=pad` repeats the order's own start, as often as needed, as DistributedSampler does."""
        if not isinstance(order, Tensor):
            return order  # which goes round by itself
        size = max(self.plan.epoch_size, self.plan.end_of_first)
        missing = size - len(order)
        if missing <= 0:
            return order
        return order.repeat(missing // len(order) + 2)[:size]

    def shard_indices(self, window: Window, shard: int) -> Tensor:
        """Virtual indices (n,) of one shard."""
        positions = window.shard(shard)
        return self.order(window.epoch)[positions.start : positions.stop : positions.step]

    def filled(self, window: Window) -> MicroSteps:
        """This process's micro steps in a window: (shards, how they lie)."""
        return self.cut(window.size)

    def _cut(self, size: int) -> MicroSteps:
        total = self.plan.batch.num_shards
        found = []
        for step in self.plan.batch.micro_steps(self.replicas, self.lanes, min(size, total)):
            layouts = tuple(Layout(tuple(len(range(v, size, total)) for v in held), self.interleaved) for held in step)
            found.append((tuple(v for held in step for v in held), Lanes(layouts)))
        return found

    def _span(self, start: int) -> list[Window]:
        """Windows from step `start` on that lie in one epoch and have the same size."""
        first = self.plan.window(start)
        found = [first]
        for step in range(start + 1, start + min(SPAN[0], max(1, SPAN[1] // first.size))):
            window = self.plan.window(step)
            if window.epoch != first.epoch or window.size != first.size:
                break
            found.append(window)
        return found

    def spans(self, start: int, stop: int) -> Iterator[list[Window]]:
        """The windows of steps start .. stop-1."""
        while start < stop:
            span = self.span(start)[: stop - start]
            yield span
            start += len(span)

    def requests(self, start: int, stop: int) -> Iterator[Request]:
        for span in self.spans(start, stop):
            epoch, size, first = span[0].epoch, span[0].size, span[0].positions.start
            highest = self.highest(epoch)
            for indices in self.places(size).cut(self.sent(epoch)[first : first + size * len(span)]):
                yield Request(epoch, indices, highest)

    def alone(self, window: Window, shard: int) -> MicroBatch:
        """One shard of `window`, whoever trains it, as that one gets it; read here and now, apart from all others."""
        indices = self.shard_indices(window, shard)
        request = Request(window.epoch, indices, self.highest(window.epoch))
        inputs, targets = next(self.source.aside().batches(iter([request])))
        lanes = Lanes((Layout((len(indices),), self.interleaved),))
        return replace(self.micro_batch(window, [((shard,), lanes)], 0, inputs, targets), is_first=False, is_last=False)

    def windows(self, start: int, stop: int) -> Iterator[WindowData]:
        """Windows of steps start .. stop-1. Nothing before `start` is read: a resume costs no data."""
        kept: deque[Again] = deque()
        batches = self.source.batches(self.requests(start, stop), kept.append if self.keep else None)
        for span in self.spans(start, stop):
            for window in span:
                again = Kept(self, window, batches, kept) if self.keep else self._micro_batches(window, batches)
                yield WindowData(window, again)

    def _micro_batches(self, window: Window, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[MicroBatch]:
        steps = self.filled(window)
        for k in range(len(steps)):
            yield self.micro_batch(window, steps, k, *self.next(batches))

    def next(self, batches: Iterator[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        began = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - began
        return batch

    def micro_batch(self, window: Window, steps: MicroSteps, k: int, inputs: Tensor, targets: Tensor) -> MicroBatch:
        """The k-th of this process's micro steps in `window`."""
        shards, lanes = steps[k]
        if self.prepare is not None:
            inputs, targets = self.prepare(inputs, targets, window.step, shards, lanes)
        # a sum over all samples of the micro step is the sum of its shards' sums already
        weight = lanes.samples / window.size if self.averages else 1 / window.num_shards
        return MicroBatch(shards, lanes, inputs, targets, weight, k == 0, k == len(steps) - 1)


class Kept:
    """The micro batches of a window that may be run again: on the device is the one that is worked on, as ever.

    Main memory holds what was read (images as uint8, a quarter of what they become); of a split that lives on the device,
    which samples it was.
    """

    def __init__(self, feed: Feed, window: Window, batches: Iterator[tuple[Tensor, Tensor]], kept: deque[Again]):
        self.feed, self.window, self.batches, self.kept = feed, window, batches, kept
        self.again: list[Again] = []

    def __iter__(self) -> Iterator[MicroBatch]:
        steps = self.feed.filled(self.window)
        for k in range(len(steps)):
            if k < len(self.again):
                inputs, targets = self.again[k]()
            else:
                inputs, targets = self.feed.next(self.batches)
                self.again.append(self.kept.popleft())
            if self.feed.prepare is not None and first(inputs).device.type == "cpu":
                inputs = mapped(Tensor.clone, inputs)  # what was read itself, which mixing would change
            yield self.feed.micro_batch(self.window, steps, k, inputs, targets)
