"""The training's own use of `Apart`: what stands around forward and backward of a micro batch of several shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch.utils._pytree import tree_leaves

from isobatch.errors import JobFailed
from isobatch.runtime.accelerator import generator
from isobatch.runtime.randomness import seed_of
from isobatch.shards.apart import Apart
from isobatch.shards.streams import NotApart, Streams

if TYPE_CHECKING:
    from isobatch.data.feed import MicroBatch

LABELS = 2**40  # of a forward's draws; more than any forward makes
LOOK = 16  # steps; so often a model that drew nothing is asked again


class SideBySide:
    """`Parts.apart`: (step, micro batch) -> a context.

    A shard that is alone on its device needs nothing; its generators were seeded for it. A model that neither draws nor
    normalises over samples needs nothing either, and pays nothing.

    Args:
        devices: of the replicas of this process. needed: whether the model draws or normalises over samples.
    """

    def __init__(self, seed: int, devices: list[torch.device], needed: bool, shard: int):
        self.seed, self.devices, self.needed, self.shard = seed, devices, needed, shard

    def __call__(self, step: int, micro: MicroBatch) -> AbstractContextManager[None]:
        if not micro.lanes.shared:
            return nullcontext()
        if self.needed:
            return self._apart(step, micro)
        return nullcontext() if step % LOOK else self._watched(step)

    @contextmanager
    def _apart(self, step: int, micro: MicroBatch) -> Iterator[None]:
        apart = Apart(self._streams(step, micro))
        apart.begin()
        try:
            with apart:
                yield
            apart.check()
        except NotApart as problem:
            raise self._failed(step, str(problem)) from problem

    def _streams(self, step: int, micro: MicroBatch) -> list[Streams]:
        rows = next(len(leaf) for leaf in tree_leaves(micro.inputs) if isinstance(leaf, torch.Tensor)) // micro.lanes.samples
        seeds = iter([seed_of("shard", self.seed, step, shard) for shard in micro.shards])
        lanes = zip(micro.lanes.times(rows).layouts, self.devices, strict=False)
        return [Streams(layout, device, list(islice(seeds, len(layout.sizes))), (i + 1) * LABELS)
                for i, (layout, device) in enumerate(lanes)]  # fmt: skip

    @contextmanager
    def _watched(self, step: int) -> Iterator[None]:
        generators = [torch.default_generator, *(generator(device) for device in self.devices if device.type != "cpu")]
        before = [g.get_state() for g in generators]
        yield
        if not all(torch.equal(g.get_state(), state) for g, state in zip(generators, before, strict=True)):
            raise self._failed(step, "began to draw random numbers, which it did not do before the training")

    def _failed(self, step: int, problem: str) -> JobFailed:
        return JobFailed(f"step {step + 1}: several shards share a forward, and the model {problem}; go on from the last "
                         f"checkpoint with batch.micro={self.shard} (one shard a forward, the same training)")  # fmt: skip
