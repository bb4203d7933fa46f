"""`task=lr_range`: a short training whose learning rate grows at every step, to see at which the loss falls (Smith 2015)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from isobatch.errors import ConfigError
from isobatch.tasks.base import Task, Work

if TYPE_CHECKING:
    from isobatch.config import Config
    from isobatch.runtime.distributed import Ranks


class LrRange(Task):
    name = "lr_range"
    trains = True

    def check(self, config: Config) -> None:
        if config.resume is not None:
            raise ConfigError("resume", config.resume, "a range begins with new weights, at its first step",
                              "set resume=null; model.checkpoint_path=RUN begins with a run's weights")  # fmt: skip

    def settled(self, config: Config, ranks: Ranks) -> Config:
        """As long as the range asks for, every step logged, without checkpoints and evaluations on the way."""
        from isobatch.checkpoint import NoCheckpoint
        from isobatch.stop import NoStop

        steps = config.lr_range.steps
        return dataclasses.replace(config, steps=steps, epochs=None, log_every=1, eval_every=steps + 1, stop=NoStop(),
                                   checkpoint=NoCheckpoint(resume="never"))  # fmt: skip

    def perform(self, work: Work) -> None:
        from isobatch.tasks.lr_ranging import lr_range

        lr_range(work)
