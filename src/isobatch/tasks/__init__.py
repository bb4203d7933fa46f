"""What `task=` names: one class each, which says how much of a run it needs and what it does with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobatch.checks import choice
from isobatch.errors import ConfigError
from isobatch.tasks.base import Task, Work
from isobatch.tasks.evaluation import Evaluate
from isobatch.tasks.export import Export
from isobatch.tasks.lr_range import LrRange
from isobatch.tasks.planning import Plan
from isobatch.tasks.predict import Predict
from isobatch.tasks.replay import Replay
from isobatch.tasks.training import Train

if TYPE_CHECKING:
    from isobatch.config import Config

__all__ = ["TABLE", "Task", "Work", "of"]

TABLE: dict[str, Task] = {task.name: task for task in (Train(), Evaluate(), Predict(), Export(), Plan(), Replay(), LrRange())}


def of(config: Config) -> Task:
    """The task that `config` names.

    Raises:
        ConfigError: there is no such task, or it lacks something.
    """
    choice("task", config.task, tuple(TABLE))
    task = TABLE[config.task]
    if config.evaluate.split not in task.splits:
        raise ConfigError("evaluate.split", config.evaluate.split, f"task={config.task} does not look at a third split",
                          "set task=evaluate, or evaluate.split=eval")  # fmt: skip
    task.check(config)
    return task
