"""Whatever a window leaves out, every gradient is reduced before its update, and what nobody used keeps none.

DDP sends a bucket when all of its parameters have a gradient. Where a rank's last micro step does not use one, nothing is sent,
and DDP says so in the next forward: after an update with gradients of this rank alone. (Its own way of looking,
`find_unused_parameters`, walks through the graph in every step, and it forgets what earlier micro steps of the window used.) So
the missing ones are completed with zeros as soon as the backward has ended, which sends their buckets.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isobatch.parallel.unused import trainable

if TYPE_CHECKING:
    from isobatch.runtime.distributed import Ranks

log = logging.getLogger(__name__)


class Usage:
    """What the ranks used in a window. All tell it in the background; only a rank that missed something waits for the others.

    Args:
        names: of the trainable parameters.
        setting: whose value `auto` is being carried out, to name when the first parameter is missed; None: say nothing.
    """

    def __init__(self, names: list[str], ranks: Ranks, setting: str | None):
        self.names, self.ranks, self.setting = names, ranks, setting
        self.used = bytearray(len(names))
        self.everything = bytes([1]) * len(names)
        self.clean = self.everything + bytes(len(names))  # used by some rank, missed by some rank
        self.table = bytearray(self.clean)
        self.tensor = torch.frombuffer(self.table, dtype=torch.uint8)
        self.work: Any = None

    def end(self) -> list[int]:
        """After a window: the parameters that no rank used. A collective, of main memory only."""
        self._settle()
        mine, n = bytes(self.used), len(self.names)
        self.used = bytearray(n)
        complete = mine == self.everything
        if not complete:
            # a rank that used nothing had no shard in a short window, or no element in its shards: it has missed nothing
            self.table[:] = mine + (bytes(1 - one for one in mine) if any(mine) else bytes(n))
        self.work = self.ranks.all_reduce_later(self.tensor, "max")
        if complete:
            return []
        self.work.wait()
        return [i for i in range(n) if not self.table[i]]

    def _settle(self) -> None:
        if self.work is not None:
            self.work.wait()  # a window later: it has long been done
        if self.table == self.clean:
            return
        if self.setting is not None:
            missed = [name for name, one in zip(self.names, self.table[len(self.names) :], strict=True) if one]
            if missed:
                log.info("%s=auto: some shards give no gradient for %d of %d parameters (%s%s): they add zeros, and what a "
                         "whole window does not use is left alone", self.setting, len(missed), len(self.names),
                         ", ".join(missed[:3]), ", ..." if len(missed) > 3 else "")  # fmt: skip
                self.setting = None
        self.table[:] = self.clean


class Completion:
    """For one model under DDP: sees which gradients arrive, and completes those that do not."""

    def __init__(self, model: nn.Module, ranks: Ranks, says: bool):
        self.parameters = trainable(model)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        self.usage = Usage(names, ranks, "parallel.find_unused_parameters" if says else None)
        self.arrived = bytearray(len(names))
        self.watching = True
        for i, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._saw, i))

    def _saw(self, i: int, _: Tensor) -> None:
        if self.watching:
            self.arrived[i] = self.usage.used[i] = 1

    def complete(self) -> None:
        """After a window's last backward on this rank, while DDP still counts."""
        missing = [p for p, one in zip(self.parameters, self.arrived, strict=True) if not one]
        if missing:
            self.watching = False
            zero(missing).backward()
            self.watching = True

    def end(self) -> None:
        """After a window: as in a single process, what no shard used has no gradient (decay and momentum would move it)."""
        self.arrived = bytearray(len(self.arrived))
        for i in self.usage.end():
            self.parameters[i].grad = None


def zero(parameters: list[nn.Parameter]) -> Tensor:
    """0 (0-d, fp32) whose backward gives every one of `parameters` a gradient of zeros, and reads none of their values."""
    return torch.cat([p.reshape(-1)[:0].float() for p in parameters]).sum()
