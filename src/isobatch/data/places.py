"""Where in a window the samples of each micro step stand, for windows of one size: many of them are cut in one go."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from isobatch.runtime import accelerator
from isobatch.shards.layout import Lanes

MicroSteps = Sequence[tuple[tuple[int, ...], Lanes]]  # (shards, how they lie), of one process


class Places:
    """
    Args:
        steps: what this process does in a window of `size` samples in `num_shards` shards.
    """

    def __init__(self, steps: MicroSteps, size: int, num_shards: int):
        self.size, self.counts = size, [lanes.samples for _, lanes in steps]
        parts = [lanes.join([torch.arange(v, size, num_shards) for v in shards]) for shards, lanes in steps]
        self.places = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        self.in_order = torch.equal(self.places, torch.arange(size))
        self.places_on = lru_cache(lambda device: accelerator.sent(self.places, device))

    def cut(self, indices: Tensor) -> Sequence[Tensor]:
        """Indices (k * size,) of k windows -> those (n,) of each micro step, window after window; views of one tensor."""
        windows = len(indices) // self.size
        if not self.counts:
            return ()
        if not self.in_order:
            indices = indices.view(windows, self.size).index_select(1, self.places_on(indices.device)).view(-1)
        return indices.split(self.counts * windows)
