"""Group `stop`: when a training ends before its length is up, by evaluations (which every rank has alike) or by time.

Each ending has a word of its own in summary.json, and exit code 0.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from isobatch import better
from isobatch.checks import positive, within
from isobatch.errors import ConfigError
from isobatch.marks import Marks

TIME_UP = 1 << 15  # what ranks agree on where time is up: above every signal's number, below a wish to save
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class Ending(NamedTuple):
    """`word`: the state of the run in summary.json. `reason`: for a person."""

    word: str
    reason: str


class StopOptions(Protocol):
    @property
    def name(self) -> str: ...

    def build(self) -> Stopping: ...


class Stopping:
    """Ends nothing."""

    ending: Ending | None = None

    def check(self, metrics: Sequence[str] | None) -> None:
        """Raise ConfigError where no evaluation will have the metric."""

    def request(self) -> int:
        """TIME_UP when time is up by this process's clock, else 0."""
        return 0

    def out_of_time(self) -> Ending:
        raise AssertionError("no time was set")

    def saw(self, result: Mapping[str, Any]) -> None:
        """Take in an evaluation's result; `ending` then says whether it was the last one."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class NoStop:
    """The run ends when its length is up."""

    name: str = "none"

    def build(self) -> Stopping:
        return Stopping()


@dataclass(frozen=True)
class Rules:
    """The first that is met ends the run, after a complete checkpoint.

    Args:
        metric: of an evaluation; `auto` = eval/loss. mode: `max` or `min` is better; `auto` for the metrics that are known.
        patience: evaluations in a row that are not better than the best by more than `min_delta` (null: not asked).
        min_delta: smallest improvement that counts.
        threshold: end when the metric is as good as this (null: not asked).
        max_time: of the training of this start of the program: `90m`, `12h`, or days:hours:minutes:seconds. The same
            command goes on from the checkpoint, with new time.
    """

    name: str = "rules"
    metric: str = "auto"
    mode: str = "auto"
    patience: int | None = None
    min_delta: float = 0.0
    threshold: float | None = None
    max_time: str | None = None

    def __post_init__(self) -> None:
        better.check("stop", self.metric, self.mode)
        within("stop.min_delta", self.min_delta, 0, 1e12)
        if self.patience is not None:
            positive("stop.patience", self.patience)
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ConfigError("stop.threshold", self.threshold, "is never met", "set stop.threshold=0.95")
        if self.max_time is not None:
            seconds(self.max_time)
        if self.patience is None and self.threshold is None and self.max_time is None:
            raise ConfigError("stop.name", self.name, "has no rule that would end a run",
                              "set stop.patience, stop.threshold or stop.max_time, or stop=none")  # fmt: skip

    @property
    def followed(self) -> str:
        return "eval/loss" if self.metric == "auto" else self.metric

    def build(self) -> Stopping:
        return ByRules(self)


class ByRules(Stopping):
    def __init__(self, options: Rules):
        self.options, self.sign = options, better.sign(options.followed, options.mode)
        self.best: float | None = None
        self.latest: float | None = None
        self.not_better = 0
        self.end = math.inf if options.max_time is None else time.monotonic() + seconds(options.max_time)

    def check(self, metrics: Sequence[str] | None) -> None:
        better.check_there("stop", self.options.followed, metrics)

    def request(self) -> int:
        return TIME_UP if time.monotonic() >= self.end else 0

    def out_of_time(self) -> Ending:
        return Ending("out_of_time", f"stop.max_time={self.options.max_time} is up")

    @property
    def ending(self) -> Ending | None:  # type: ignore[override]
        """By what was seen so far and today's options: a resumed run may have others."""
        options, metric = self.options, self.options.followed
        if options.threshold is not None and self.latest is not None \
                and self.sign * self.latest >= self.sign * options.threshold:  # fmt: skip
            return Ending("threshold_reached", f"{metric} is {self.latest:.6g}, and stop.threshold={options.threshold:g}")
        if options.patience is not None and self.not_better >= options.patience:
            by = f" by more than {options.min_delta:g} (stop.min_delta)" if options.min_delta else ""
            plural = "s" * (self.not_better != 1)
            return Ending(
                "early_stopped", f"{metric} was not better{by} in {self.not_better} evaluation{plural} (stop.patience)"
            )
        return None

    def saw(self, result: Mapping[str, Any]) -> None:
        value = better.value("stop", self.options.followed, result)
        self.latest = value if math.isfinite(value) else None
        if self.latest is None or (self.best is not None and self.sign * (value - self.best) <= self.options.min_delta):
            self.not_better += 1
        else:
            self.best, self.not_better = value, 0

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.options.followed, "best": self.best, "latest": self.latest, "not_better": self.not_better}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["metric"] == self.options.followed:  # what was seen of another metric says nothing of this one
            self.best, self.latest = (None if state[key] is None else float(state[key]) for key in ("best", "latest"))
            self.not_better = int(state["not_better"])


def seconds(text: str) -> float:
    """`90m`, `12h`, `1.5d`, `45s`, or days:hours:minutes:seconds (the first may be left out) in seconds."""
    parts = text.split(":")
    found: float | None = None
    if match := re.fullmatch(r"([0-9]+\.?[0-9]*)([smhd])", text.strip()):
        found = float(match[1]) * UNITS[match[2]]
    elif 2 <= len(parts) <= 4 and all(re.fullmatch("[0-9]{1,6}", part) for part in parts):
        found = float(sum(int(part) * unit for part, unit in zip(reversed(parts), UNITS.values(), strict=False)))
    if not found or found > 1e9:
        raise ConfigError("stop.max_time", text, "is no time", "set stop.max_time=90m, 12h or 01:30:00")
    return found


TABLE: dict[str, Any] = {"none": NoStop, "rules": Rules}
MARKS = Marks(resume="free")
