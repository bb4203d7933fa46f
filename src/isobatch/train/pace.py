"""Who waits for whom in the first steps: told once, so that a person with a small model learns of `cuda_graph=true`.

The host gives a device its work step by step and runs ahead of it. When a step has been given out and the one before it is
already done, the device had nothing to do in between: the host is the limit. Asking costs an event and a query a step, no
wait, and the training is the same.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from isobatch.train import graph

if TYPE_CHECKING:
    from isobatch.config import Config
    from isobatch.runtime.distributed import Ranks
    from isobatch.train.state import TrainState

log = logging.getLogger("isobatch")

FIRST = 10  # steps that are not looked at: kernels are chosen, memory is laid out, the host gets ahead
LOOKED_AT = 30  # steps after them
IDLE = 0.9  # of those: the share after which the device was done, for the host to be the limit
READING = 0.3  # of the time: what waiting for data takes at least, for the data to be the limit


def watched(config: Config, state: TrainState, ranks: Ranks, device: torch.device) -> Pace | None:
    """A look at the first steps where it can tell something: on CUDA, on one rank, in steps that never wait for the device."""
    waits = state.scaler.is_enabled() or config.on_nonfinite == "skip" or state.reducer.replays
    if device.type != "cuda" or not ranks.is_main or config.cuda_graph is not None or waits:
        return None
    return Pace(device, graph.obstacle(config, device) is None)


class Pace:
    """
    Args:
        graphs: whether `cuda_graph=true` could be had.
    """

    def __init__(self, device: torch.device, graphs: bool):
        self.device, self.graphs = device, graphs
        self.steps = self.idle = self.seen = 0
        self.before: Any = None  # the event behind the step before
        self.began = self.read = 0.0

    def drained(self) -> None:
        """The host has waited for the device: that the step before is done says nothing."""
        self.before = None

    def step(self, reading: float) -> Pace | None:
        """After each step has been given out; `reading`: seconds that data were waited for so far. None: enough was seen."""
        self.steps += 1
        if self.steps == FIRST:
            self.began, self.read = time.perf_counter(), reading
        before, self.before = self.before, torch.accelerator.current_stream(self.device).record_event()
        if self.steps > FIRST and before is not None:
            self.seen += 1
            self.idle += before.query()
        if self.steps < FIRST + LOOKED_AT:
            return self
        if self.seen >= LOOKED_AT // 2 and self.idle >= IDLE * self.seen:
            self._tell((reading - self.read) / max(time.perf_counter() - self.began, 1e-9))
        return None

    def _tell(self, reading: float) -> None:
        if reading >= READING:
            log.info("the device waits for data (%.0f %% of the time of the first steps): raise data.num_workers, or store "
                     "smaller images", 100 * reading)  # fmt: skip
        elif self.graphs:
            log.info("the device waits for the host, which starts its kernels one by one: cuda_graph=true starts a step in a "
                     "few calls (cuda_graph=false: no such line)")  # fmt: skip
