"""Which step, rank and samples a loss that is not finite came from, at no cost per step.

The loss is read back only when it is logged. Until then each step leaves a reference to its loss on the device; only
when a logged loss turns out not to be finite are they read.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from isobatch.batch_plan import Window
    from isobatch.data.feed import Feed
    from isobatch.runtime.distributed import Ranks

KEPT = 4096  # steps looked back over: a loss of NaN stays one, so an older beginning is named "or before"
SHOWN = 8  # sample indices


class LossWatch:
    """The losses of this rank's shards since the last logged step."""

    def __init__(self) -> None:
        self.seen: deque[tuple[Window, Tensor]] = deque(maxlen=KEPT)

    def saw(self, window: Window, reducer: Any) -> None:
        """After each step; nothing is read. `reducer.local_loss()`: this rank's part of the window's loss, or None."""
        loss = reducer.local_loss()
        if loss is not None:
            self.seen.append((window, loss))

    def clear(self, step: int) -> None:
        """The loss logged at `step` is finite, so all up to it were: NaN does not go away by itself."""
        while self.seen and self.seen[0][0].step < step:  # a window counts from 0
            self.seen.popleft()

    def first_bad(self, rank: int, feed: Feed) -> tuple[int, int, float, list[int]] | None:
        """(step, rank, loss, sample indices) of the first loss of this rank that is not finite."""
        for window, loss in self.seen:
            value = float(loss.sum())
            if not torch.isfinite(loss).all():
                shards = [shard for shards, _ in feed.filled(window) for shard in shards]
                if loss.ndim == 1:  # one loss per shard: the samples of the bad ones alone
                    shards = [shard for shard in shards if not torch.isfinite(loss[shard])]
                indices = [int(i) for shard in shards for i in feed.shard_indices(window, shard)]
                return window.step + 1, rank, value, indices
        return None

    def story(self, ranks: Ranks, feed: Feed, loss: float, step: int) -> str:
        """One line for a person, the same on all ranks. A collective."""
        found = ranks.gather_objects(self.first_bad(ranks.rank, feed))
        bad = ranks.broadcast_object(min([f for f in found if f], default=None) if found else None)
        if bad is None:
            where = f"train/loss is {loss} at step {step}"
        else:
            size, samples = len(bad[3]), ", ".join(map(str, bad[3][:SHOWN]))
            samples += ", ..." * (size > SHOWN)
            where = f"train/loss is {bad[2]} at step {bad[0]} on rank {bad[1]} (samples {samples})"
        return f"{where}; the last good checkpoint is kept: lower optimizer.lr, or set on_nonfinite=skip"
