"""All state that changes during a run, in one place: a checkpoint saves this and the plain config, nothing else."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from isobatch.precision.scaling import LossScaler
from isobatch.runtime import dtensor


class Follower(Protocol):
    """Decides by what evaluations say, which every rank has alike."""

    def saw(self, result: dict[str, float], /) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """Plain data; {} where there is nothing to remember."""

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass
class TrainState:
    """
    Args:
        model: unwrapped; fp32 also where the forward runs on a half copy.
        ema: ema.average.Average or one of its kind, or None.
        reducer: holds the exact reduction's exponents; {} for the others.
        step: windows consumed; update: updates applied; samples: consumed, over all ranks.
        evaluated: the step of the latest evaluation: one that a stop left out is made up for.
        best: metric -> {"value": float, "step": int}.
        better: which weights the latest evaluation found the better ones, `ema` (or all there are) or `raw`.
        logger_run_id: so that a resumed run goes on in the same logger run.
        followers: name -> what decides something by evaluations (the schedule, an early stop), and saves what it has seen.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    ema: Any = None
    reducer: Any = None
    step: int = 0
    update: int = 0
    skipped_steps: int = 0
    samples: int = 0
    evaluated: int = 0
    best: dict[str, dict[str, float]] = field(default_factory=dict)
    better: str = "ema"
    logger_run_id: str | None = None
    followers: dict[str, Follower] = field(default_factory=dict)

    COUNTERS = ("step", "update", "skipped_steps", "samples", "evaluated", "best", "better", "logger_run_id")

    def __post_init__(self) -> None:
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    def ema_update(self) -> None:
        if self.ema is not None:
            self.ema.update(self.model, step=self.update + 2)  # timm counts from 2: its first update would copy

    def evaluated_model(self, device: torch.device) -> nn.Module:
        """What evaluations look at: the EMA where there is one, else the model. On `device`, if need be a copy."""
        module: nn.Module = self.model if self.ema is None else self.ema.module
        if all(p.device == device for p in module.parameters()):
            return module
        return copy.deepcopy(module).to(device)

    def clip_gradients(self, max_norm: float | None) -> Tensor:
        """Norm of the gradients over all parameters, 0-d, before they are scaled to at most `max_norm` (None: left alone)."""
        sizes = {p.grad.dtype.itemsize for p in self.parameters if p.grad is not None}
        if 2 in sizes:
            return self._clip_half(max_norm, torch.float64 if 8 in sizes else torch.float32)
        if max_norm is None:  # not an infinite maximum: where the norm is inf, that would make NaN of all gradients
            return dtensor.whole(torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))  # type: ignore[no-any-return]
        return dtensor.whole(torch.nn.utils.clip_grad_norm_(self.parameters, max_norm))  # type: ignore[no-any-return]

    def _clip_half(self, max_norm: float | None, wide: torch.dtype) -> Tensor:
        """The same in `wide`: as a number of its own type the norm of half gradients soon is infinite (fp16: 65,504)."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if any(hasattr(g, "to_local") for g in gradients):  # spread over ranks: no list of them has a norm in another type
            norms = [torch.linalg.vector_norm(g, dtype=wide) for g in gradients]
        else:
            norms = list(torch._foreach_norm(gradients, 2.0, dtype=wide))
        norm: Tensor = dtensor.whole(torch.linalg.vector_norm(torch.stack(norms)))
        if max_norm is not None:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Plain containers, numbers, strings and tensors (which may be spread over ranks: dtensor.whole_tree); keys without
        any wrapper's prefix."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "reducer": {} if self.reducer is None else self.reducer.state_dict(),
            "counters": {name: getattr(self, name) for name in self.COUNTERS} | self._followed(),
        }

    def follow(self, result: dict[str, float]) -> None:
        """Show an evaluation's result to all that decide by it."""
        for follower in self.followers.values():
            follower.saw(result)

    def _followed(self) -> dict[str, Any]:
        found = {name: seen for name, follower in self.followers.items() if (seen := follower.state_dict())}
        return {"followers": found} if found else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Strict. A missing scaler state or EMA (saved under another precision or without EMA) starts afresh."""
        self.model.load_state_dict(dtensor.weights_like(state["model"], self.model))
        groups = self.optimizer.param_groups
        order = [number for group in self.optimizer.state_dict()["param_groups"] for number in group["params"]]
        parameters = [p for group in groups for p in group["params"]]
        self.optimizer.load_state_dict(dtensor.optimizer_like(state["optimizer"], parameters, order))
        self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            self.ema.module.load_state_dict(dtensor.weights_like(state["ema"] or state["model"], self.ema.module))
        if self.reducer is not None:
            self.reducer.load_state_dict(state["reducer"])
        for name in self.COUNTERS:
            if name in state["counters"] or name != "better":  # newer than some checkpoints
                setattr(self, name, state["counters"][name])
        for name, seen in state["counters"].get("followers", {}).items():
            if name in self.followers:
                self.followers[name].load_state_dict(seen)


def weights_sha256(model: nn.Module) -> str:
    """Over the state dict in sorted key order: each key's UTF-8 name, then the tensor's little-endian bytes.

    Of the whole weights: where they are spread over ranks, a collective.
    """
    digest = hashlib.sha256()
    for key, tensor in sorted(model.state_dict().items()):
        digest.update(key.encode())
        data = dtensor.whole(tensor).detach().cpu().contiguous()
        digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    return digest.hexdigest()
