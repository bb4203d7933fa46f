"""The optimizer's update as a CUDA graph: recorded once, replayed with each step's learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isobatch.train.recording import WARM, capture


class Update:
    """Stands in for `optimizer.step`: runs the first updates, then records one and replays it with each step's rate.

    Only while it is recorded do the groups hold the rate as a tensor, so checkpoints and the schedule never see it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pool: Any):
        self.optimizer, self.run, self.pool = optimizer, optimizer.step, pool
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.rates: list[Tensor] = []
        self.said: list[float] = []
        self.addresses: list[int] = []

    @staticmethod
    def possible(optimizer: torch.optim.Optimizer) -> bool:
        """torch's fused ones read rate and step count on the device; others keep running, as a few launches or many."""
        known = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
        return type(optimizer) in known and all(group["fused"] for group in optimizer.param_groups)

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= WARM:
            self.run()
            return
        if self.graph is None:
            self._record()
        if self.addresses != self._addresses():  # somebody gave a parameter another gradient, or took it away
            self.run()
            return
        for rate, said, group in zip(self.rates, self.said, self.optimizer.param_groups, strict=True):
            if said != group["lr"]:
                rate.fill_(group["lr"])
        self.said = [group["lr"] for group in self.optimizer.param_groups]
        assert self.graph is not None
        self.graph.replay()

    def _addresses(self) -> list[int]:
        groups = self.optimizer.param_groups
        return [0 if p.grad is None else p.grad.data_ptr() for group in groups for p in group["params"]]

    def _record(self) -> None:
        groups = self.optimizer.param_groups
        device = groups[0]["params"][0].device
        self.rates = [torch.full((), group["lr"], device=device) for group in groups]
        self.said, self.addresses = [group["lr"] for group in groups], self._addresses()
        self.graph = torch.cuda.CUDAGraph()
        before = [{key: group[key] for key in ("lr", "capturable") if key in group} for group in groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        try:
            with capture(self.graph, self.pool, "the update"):
                self.run()
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(**values)
