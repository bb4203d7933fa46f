"""The one schedule that follows what evaluations say: the same on every rank and plan, since they do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobatch import better
from isobatch.checks import within
from isobatch.scheduler.shapes import Shape


@dataclass(frozen=True)
class Plateau(Shape):
    """torch's ReduceLROnPlateau: `gamma` times less whenever `metric` has not improved for more than `patience` evaluations.

    Args:
        metric: of an evaluation; `auto` = eval/loss. mode: `max` or `min` is better; `auto` for the metrics that are known.
        threshold: smallest improvement that counts, as a share of the best.
        cooldown: evaluations after a drop that are not counted.
        final: the factor never falls below it.
    """

    name: str = "plateau"
    metric: str = "auto"
    mode: str = "auto"
    gamma: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    cooldown: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        better.check("scheduler", self.metric, self.mode)
        within("scheduler.gamma", self.gamma, 0, 0.999999)
        within("scheduler.patience", self.patience, 0, 1e9)
        within("scheduler.threshold", self.threshold, 0, 1)
        within("scheduler.cooldown", self.cooldown, 0, 1e9)
        within("scheduler.final", self.final, 0, 1)

    @property
    def followed(self) -> str:
        return "eval/loss" if self.metric == "auto" else self.metric

    def follow(self) -> Follow:
        return Follow(self)


class Follow:
    """Holds torch's scheduler over a rate of 1."""

    def __init__(self, options: Plateau):
        from torch import nn, optim

        self.options = options
        self.rate = optim.SGD([nn.Parameter()], lr=1.0)
        mode = "max" if better.sign(options.followed, options.mode) > 0 else "min"
        self.inner = optim.lr_scheduler.ReduceLROnPlateau(
            self.rate, mode=mode, factor=options.gamma, patience=options.patience,  # type: ignore[arg-type]
            threshold=options.threshold, cooldown=options.cooldown, min_lr=options.final, eps=0.0,
        )  # fmt: skip

    @property
    def factor(self) -> float:
        return float(self.rate.param_groups[0]["lr"])

    def saw(self, result: Mapping[str, Any]) -> None:
        """Take in an evaluation's result. Raises ConfigError where it lacks the metric."""
        self.inner.step(better.value("scheduler", self.options.followed, result))

    def state_dict(self) -> dict[str, Any]:
        best = float(self.inner.best)
        return {"best": best if math.isfinite(best) else None, "bad": int(self.inner.num_bad_epochs),
                "cooldown": int(self.inner.cooldown_counter), "factor": self.factor}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["best"] is not None:
            self.inner.best = float(state["best"])
        self.inner.num_bad_epochs, self.inner.cooldown_counter = int(state["bad"]), int(state["cooldown"])
        self.rate.param_groups[0]["lr"] = min(1.0, max(0.0, float(state["factor"])))
