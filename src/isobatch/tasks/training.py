"""`task=train`."""

from __future__ import annotations

from isobatch.tasks.base import Task, Work


class Train(Task):
    name = "train"
    trains = True

    def perform(self, work: Work) -> None:
        if work.earlier is not None:
            work.loop.last_eval = work.earlier
            return
        work.loop.train()
        work.loop.checkpointer.wait()
