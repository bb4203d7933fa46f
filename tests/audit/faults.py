"""Injected faults: one bit, at one place, once or now and then, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import train
from torch import Tensor

from isobatch.audit import replay
from isobatch.errors import JobFailed
from isobatch.runtime.distributed import Ranks

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(tensor: Tensor, place: int = 3, bit: int = 20) -> None:
    """One bit of one element, in place."""
    with torch.no_grad():
        flat = tensor.data.reshape(-1)  # autograd does not see it
        assert flat.data_ptr() == tensor.data_ptr()
        kind = INTEGERS[tensor.element_size()]
        flat.view(kind)[place % flat.numel()] ^= torch.tensor(1 << bit % (8 * tensor.element_size() - 2), dtype=kind)


@dataclass
class Fault:
    """
    Args:
        kind: gradient, activation, shard statistic: of a shard; weight, optimizer, statistic, average: of the state.
        step: the one it is in (of a shard, the one that this audit looks at), or before which it is; counted from 1.
        recompute: in the second computation of another rank's shard, not in the training's own.
        also: further steps: in these, and in `step`, every shard of the rank is hit.
    """

    kind: str
    rank: int
    step: int
    recompute: bool = False
    also: tuple[int, ...] = ()
    now: tuple[int, int] = (0, -1)
    done: bool = False
    handles: list[Any] = field(default_factory=list)

    def watch(self, audit: replay.Audit, parts: Any) -> None:
        original = parts.seed

        class Seed:
            def __call__(seed, step: int, shards: tuple[int, ...]) -> None:
                original(step, shards)
                self.now = step + 1, shards[0]

            def __getattr__(seed, name: str) -> Any:
                return getattr(original, name)

        self.audit = audit
        parts.seed = Seed()
        module = parts.working.module
        layers = [m for m in module.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
        if self.kind == "gradient":
            layers[1].weight.register_hook(lambda g: self.hit(g.clone()))
        if self.kind == "activation":
            layers[1].register_forward_hook(lambda m, a, output: self.hit(output.clone()) if output.requires_grad else output)
        if self.kind == "shard statistic":
            norm = next(m for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d))
            norm.register_forward_hook(lambda m, a, output: (self.hit(m.running_mean), None)[1])

    def hit(self, tensor: Tensor) -> Tensor:
        """`tensor`, with the fault if this is its moment."""
        due = self.audit.due
        if self.also and self.audit.ranks.rank == self.rank:
            if self.now[0] in (self.step, *self.also) and self.audit.mine is not None:
                flip(tensor)
            return tensor
        if self.done or due is None or self.now[0] != self.step or self.audit.ranks.rank != self.rank:
            return tensor
        own = self.audit.mine is not None and self.now[1] == self.audit.mine.shard
        if own == self.recompute or (self.recompute and self.audit.mine is not None):
            return tensor
        self.done = True
        flip(tensor)
        return tensor

    def after(self, state: Any, parts: Any) -> None:
        """After a step."""
        if self.done or state.step + 1 != self.step or self.audit.ranks.rank != self.rank:
            return
        if self.kind == "weight":
            flip(state.parameters[1])
        elif self.kind == "optimizer":
            flip(next(t for t in state.optimizer.state[state.parameters[0]].values() if t.numel() > 1))
        elif self.kind == "statistic":
            flip(next(m for m in state.model.modules() if isinstance(m, torch.nn.BatchNorm2d)).running_var)
        elif self.kind == "average":
            flip(next(iter(state.ema.module.parameters())))
        else:
            return
        self.done = True


def train_with(fault: Fault | None, made: dict[str, Any], folder: Path, ranks: Ranks) -> str:
    """Train in this process as one of `ranks`; returns why it ended ("" = it came to its end)."""
    audits: list[Any] = []
    original: Callable[..., Any] = replay.Audit.__call__

    def watched(self: replay.Audit, state: Any, parts: Any, windows: Any) -> Any:
        if fault is not None:
            fault.watch(self, parts)
        audits.append(self)
        return original(self, state, parts, windows)

    replay.Audit.__call__ = watched  # type: ignore[method-assign]
    try:
        train(folder, made=made, ranks=ranks, observe=lambda state, parts, window: fault and fault.after(state, parts))
    except JobFailed as error:
        return str(error)
    finally:
        replay.Audit.__call__ = original  # type: ignore[method-assign]
    return ""
