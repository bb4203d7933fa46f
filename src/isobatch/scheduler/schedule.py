"""A schedule laid over a run: lengths in updates, and the factor of each update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from isobatch.amounts import in_updates
from isobatch.better import check_there


class Factors(Protocol):
    """The options of group `scheduler`. Those that need more of a run have, beside or instead of `factor`:

    `amounts`: options that are lengths, and come to `factor` in updates; `built(total)` -> (update -> factor);
    `followed`, the metric, and `follow()` -> what sees every evaluation and has a `factor` of its own (Plateau).
    """

    @property
    def name(self) -> str: ...

    def factor(self, update: int, total: int) -> float:
        """What the learning rate is multiplied with for that update (0-based) of a run of `total` updates."""


class Schedule:
    """`schedule(update)` -> factor of a run of `total` updates, of which the first `ahead` do not count (BatchPlan.ahead).

    Raises:
        ConfigError: a length that the schedule cannot do.
    """

    def __init__(self, options: Any, total: int, updates_per_epoch: int, ahead: int = 0):
        total -= ahead
        self.options, self.total, self.ahead = in_updates(options, total, updates_per_epoch), total, ahead
        self.hold = updates_per_epoch if getattr(options, "per_epoch", False) else 1
        build = getattr(self.options, "built", None)
        self.factor: Callable[[int], float] = build(total) if build else lambda update: self.options.factor(update, total)
        self.follow = options.follow() if hasattr(options, "follow") else None

    def __call__(self, update: int) -> float:
        update = max(0, update - self.ahead)
        factor = self.factor(update - update % self.hold)
        return factor if self.follow is None else factor * self.follow.factor  # type: ignore[no-any-return]

    def check(self, metrics: Sequence[str] | None) -> None:
        """Raise ConfigError where no evaluation will have the metric that it follows."""
        if self.follow is not None:
            check_there("scheduler", self.options.followed, metrics)

    def saw(self, result: Mapping[str, Any]) -> None:
        """Take in an evaluation's result, which every rank has alike."""
        if self.follow is not None:
            self.follow.saw(result)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.follow is None else self.follow.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.follow is not None and state:
            self.follow.load_state_dict(state)
