"""Group `checkpoint`: complete or absent, plain data, loadable in torch's safe mode.

Why not torch.distributed.checkpoint: its reader unpickles the folder's `.metadata`, which runs whatever a hostile
folder says. The state is replicated over ranks, so one rank writes one file and any number of ranks can read it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch import better
from isobatch.amounts import period
from isobatch.better import KNOWN
from isobatch.checkpoint.reading import Saved, load, read
from isobatch.checkpoint.saving import Checkpointer
from isobatch.checks import choice, positive, within
from isobatch.errors import ConfigError
from isobatch.marks import Marks

if TYPE_CHECKING:
    from isobatch.runtime.distributed import Ranks

__all__ = ["MARKS", "TABLE", "Checkpoint", "Checkpointer", "NoCheckpoint", "Saved", "load", "read"]


@dataclass(frozen=True)
class NoCheckpoint:
    """Save nothing (for speed measurements).

    Args:
        resume: `auto` goes on from the run folder's own checkpoints, where there are some (a restart, a sweep run
            again); `never` starts over and puts them aside.
        load: which checkpoint `resume=RUN` means: last, best or step-N; `mean`: the mean of all step-N, of weights alone.
        weights: which of its weights task=evaluate and task=export take: `ema` (the average), `raw` (those that were
            trained), `auto` (the average, where the run kept one; of `best` the better of the two).
    """

    name: str = "none"
    resume: str = "auto"
    load: str = "last"
    weights: str = "auto"

    def __post_init__(self) -> None:
        choice("checkpoint.resume", self.resume, ("auto", "never"))
        choice("checkpoint.weights", self.weights, ("auto", "ema", "raw"))
        if not re.fullmatch(r"last|best|mean|step-[0-9]{1,15}", self.load):
            raise ConfigError("checkpoint.load", self.load, "is no checkpoint's name", "choose last, best, step-N or mean")

    def check(self, metrics: Sequence[str] | None) -> None:
        """Nothing is followed."""

    def build(self, run_dir: Path, ranks: Ranks, about: dict[str, Any]) -> Checkpointer:
        return Checkpointer(Checkpoint(), run_dir, ranks, about, enabled=False)


@dataclass(frozen=True)
class Checkpoint(NoCheckpoint):
    """Save while training, at its end and on a stop.

    Args:
        every: updates, epochs or a share of the run between checkpoints (null: by time, at the best evaluation, at the end
            and on a stop).
        every_minutes: minutes between checkpoints, by the main rank's clock (null: not by time).
        keep: numbered checkpoints `step-N` that are kept. The newest shares its files with `last`, so the second one is
            what is left when those are damaged.
        keep_best: of the checkpoints after an evaluation, the best so many by the metric of `best` are kept too.
        best: the metric that `best` follows; `auto` = eval/accuracy, eval/loss for data without classes; null = none.
        mode: `max` or `min` is better; `auto` for the metrics that evaluation knows.
    """

    amounts: ClassVar[tuple[str, ...]] = ("every",)
    name: str = "checkpoint"
    every: Any = None
    every_minutes: float | None = 15.0
    keep: int = 2
    keep_best: int = 0
    best: str | None = "auto"
    mode: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every is not None:
            object.__setattr__(self, "every", period("checkpoint.every", self.every))
        if self.every_minutes is not None:
            positive("checkpoint.every_minutes", self.every_minutes)
        positive("checkpoint.keep", self.keep)
        within("checkpoint.keep_best", self.keep_best, 0, 1e6)
        if self.keep_best and self.best is None:
            raise ConfigError("checkpoint.keep_best", self.keep_best, "the best by which metric? checkpoint.best=null",
                              "set checkpoint.best=auto or checkpoint.keep_best=0")  # fmt: skip
        better.check("checkpoint", "auto" if self.best is None else self.best, self.mode)
        if self.best in (None, "auto") and self.mode != "auto":
            raise ConfigError("checkpoint.mode", self.mode, f"checkpoint.best={self.best} names no metric",
                              "set checkpoint.best=eval/accuracy, or checkpoint.mode=auto")  # fmt: skip

    def build(self, run_dir: Path, ranks: Ranks, about: dict[str, Any]) -> Checkpointer:
        return Checkpointer(self, run_dir, ranks, about)

    def check(self, metrics: Sequence[str] | None) -> None:
        """Refuse to follow a metric that no evaluation of this run will have (see better.there)."""
        if self.best not in (None, "auto"):
            better.check_there("checkpoint", str(self.best), metrics, "best")

    def direction(self, metric: str) -> str | None:
        """`max` or `min` is better for `metric`; None = not known, so it is not tracked."""
        return self.mode if metric == self.best and self.mode != "auto" else KNOWN.get(metric)

    def followed(self, result: dict[str, float]) -> str | None:
        """The metric of an evaluation's result that `best` follows."""
        return better.main(result) if self.best == "auto" else self.best

    def better(self, best: dict[str, dict[str, float]], result: dict[str, float]) -> str | None:
        """Which weights are better than ever by the metric that `best` follows: `ema` (or all there are), `raw`, or None."""
        followed = self.followed(result)
        if followed is None or (direction := self.direction(followed)) is None:
            return None
        better.value("checkpoint", followed, result, "best")
        raw = followed.replace("eval/", "eval/raw_")
        sign = 1 if direction == "max" else -1
        kinds = ("ema", followed, "eval/loss"), ("raw", raw, "eval/raw_loss")
        found = {which: sign * result[key] for which, key, loss in kinds
                 if key in result and math.isfinite(result[key]) and math.isfinite(result.get(loss, 0.0))}  # fmt: skip
        if not found:
            return None
        which = max(found, key=lambda name: found[name])  # the average, where both are alike
        before = [sign * best[key]["value"] for key in (followed, raw) if key in best]
        return which if all(found[which] > value for value in before) else None

    def improved(self, best: dict[str, dict[str, float]], result: dict[str, float], step: int) -> list[str]:
        """Enter what is better than ever into `best` (metric -> value and step); returns those metrics.

        NaN is never better, and an evaluation whose loss is not finite counts for no metric: a model of NaNs still gets
        some samples right.
        """
        found = []
        for metric, value in result.items():
            direction = self.direction(metric)
            if direction is None or not (
                math.isfinite(value)
                and math.isfinite(result.get("eval/raw_loss" if metric.startswith("eval/raw_") else "eval/loss", 0.0))
            ):
                continue
            sign = 1 if direction == "max" else -1
            if metric not in best or sign * value > sign * best[metric]["value"]:
                best[metric] = {"value": value, "step": step}
                found.append(metric)
        return found


TABLE: dict[str, Any] = {"checkpoint": Checkpoint, "none": NoCheckpoint}
MARKS = Marks(resume="free")
