"""When ranks ask each other whether to stop."""

from __future__ import annotations

import time
from collections.abc import Callable

from isobatch.runtime.distributed import Ranks


class StopPoll:
    """Ranks agree on a stop at a step boundary, about once a second, so that the question costs nothing per step."""

    def __init__(self, ranks: Ranks, requested: Callable[[], int]):
        self.ranks, self.requested = ranks, requested
        self.next_step, self.asked_at, self.asked_step = 0, time.monotonic(), 0

    def due(self, step: int) -> int:
        """The signal to stop for, or SAVE_NOW; 0 = neither. The same on every rank."""
        if self.ranks.world_size == 1:
            return self.requested()
        if step < self.next_step:
            return 0
        signum = self.ranks.agree(self.requested())
        now = time.monotonic()
        pace = (now - self.asked_at) / max(1, step - self.asked_step)
        # the slowest rank's pace decides, so that all ask again at the same step
        self.next_step = step + max(1, 1000 // max(1, self.ranks.agree(round(pace * 1000))))
        self.asked_at, self.asked_step = now, step
        return signum
