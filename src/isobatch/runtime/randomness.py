"""Every seed of a run. A seed is a function of what is drawn for, never of rank, worker or number of calls before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_of(purpose: str, *key: int) -> int:
    """A 63-bit seed from a purpose and integers: the same in every process, on every plan."""
    digest = blake2b(repr((purpose, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), NumPy and Python before the weights are drawn."""
    import numpy
    import torch

    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


class ShardSeeder:
    """Seeds what dropout and stochastic depth draw from, before the forward of each shard.

    The generators are seeded directly: torch.manual_seed formats a stack for its lazy CUDA call and is 100 times slower.
    A device's generator keeps its seed on the host, so nothing here waits for it.
    """

    def __init__(self, seed: int, devices: list[torch.device]):
        from isobatch.runtime.accelerator import generator

        self.seed = seed
        self.generators = [generator(device) for device in devices]

    def __call__(self, step: int, shards: tuple[int, ...]) -> None:
        """Shard i of the micro step runs on device i."""
        for generator, shard in zip(self.generators, shards, strict=False):
            generator.manual_seed(seed_of("shard", self.seed, step, shard))


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed torch, NumPy and Python for one draw from a dataset; `index` is the sampler's virtual index."""
    import numpy
    import torch

    key = seed_of("sample", seed, epoch, index)
    torch.default_generator.manual_seed(key)
    numpy.random.seed(key % 2**32)
    random.seed(key)


@contextmanager
def isolated_generators() -> Iterator[None]:
    """Leave the global generators of torch (CPU), NumPy and Python as they were, whatever is drawn inside."""
    import numpy
    import torch

    states = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        numpy.random.set_state(states[1])
        random.setstate(states[2])
