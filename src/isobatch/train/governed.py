"""What stands beside the step: schedule, stopping rules, clipping, the chain of digests; built together, and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from isobatch import better
from isobatch.audit.chain import Chain
from isobatch.clip.clipping import Clipping, held_back
from isobatch.optimizer.groups import held_until
from isobatch.scheduler import Schedule
from isobatch.stop import Stopping
from isobatch.study import around
from isobatch.train.state import Follower

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from isobatch.batch_plan import BatchPlan
    from isobatch.config import Config
    from isobatch.metrics.base import Metric
    from isobatch.runtime.distributed import Ranks


class Governed(NamedTuple):
    schedule: Schedule
    stopping: Stopping
    clip: Clipping
    chain: Chain

    @property
    def followers(self) -> dict[str, Follower]:
        return {"schedule": self.schedule, "stop": self.stopping, "audit": self.chain}


def governed(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, total: int, plan: BatchPlan,
             metrics: Sequence[Metric], averaged: bool, run_dir: Path, ranks: Ranks) -> Governed:  # fmt: skip
    """
    Args:
        total: updates of the run. metrics: of the evaluations. averaged: there is an average of the weights.
    Raises:
        ConfigError: a length that cannot be, or a metric that no evaluation will have.
    """
    per_epoch = plan.windows_per_epoch
    clip = held_back(config.clip.build(model, config.max_grad_norm), held_until(optimizer, total, per_epoch))
    names = better.there([metric.names for metric in metrics], averaged)
    stopping = around(config.stop.build(), run_dir, ranks, config.sweep.objective)
    found = Governed(Schedule(config.scheduler, total, per_epoch, plan.ahead), stopping, clip,
                     config.audit.chain(config.reduction.exact))  # fmt: skip
    for follower in (found.schedule, found.stopping, config.checkpoint):
        follower.check(names)
    return found
