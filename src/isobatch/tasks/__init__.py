"""What `task=` names: one class each, which says how much of a run it needs and what it does with it."""

from __future__ import annotations

import dataclasses
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

__all__ = ["TABLE", "Task", "Work", "of", "unheard"]

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


def unheard(config: Config) -> list[str]:
    """A line for what is set and says nothing to the task that is done: another task's settings, weights to look at."""
    mine, found = TABLE[config.task], []
    for task in ("replay", "predict", "lr_range"):  # whose settings have its name
        given = getattr(config, task)
        changed = [field.name for field in dataclasses.fields(given) if getattr(given, field.name) != field.default]
        if changed and TABLE[task] is not mine:
            key = f"{task}.{'from' if (task, changed[0]) == ('replay', 'start') else changed[0]}"
            found.append(f"{key} says nothing to task={config.task}: it is of task={task}")
    if mine.trains and config.checkpoint.weights != "auto":
        found.append(f"checkpoint.weights={config.checkpoint.weights} says nothing to task={config.task}, which takes a "
                     "checkpoint whole: it is of evaluations, predictions and exports")  # fmt: skip
    return found
