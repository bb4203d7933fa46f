"""The learning rate range test: what it trains, where it ends, and what it suggests."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Sequence
from typing import Any

from isobatch.errors import ConfigError, JobFailed
from isobatch.tasks.base import Work

log = logging.getLogger("isobatch")
FORGETS = 0.9  # of the running mean that the loss is smoothed by
FEWEST = 10  # steps that something can be read from


class Diverged(Exception):
    """The loss is so much worse than it was that larger rates tell nothing."""


def lr_range(work: Work) -> None:
    """Train while the rate grows from `lr_range.start` to `lr_range.end`; write losses, plot and suggestion. A collective."""
    loop, options = work.loop, work.config.lr_range
    base = max(group["initial_lr"] for group in loop.state.optimizer.param_groups)
    growth = (options.end / options.start) ** (1 / max(1, loop.total_steps - 1))
    loop.schedule = lambda update: options.start * growth**update / base
    found: list[tuple[float, float]] = []
    inner = loop._log

    def watched(row: dict[str, Any]) -> None:
        inner(row)
        found.append((row["train/lr"], row["train/loss"]))
        smooth = smoothed([loss for _, loss in found])
        if len(found) >= FEWEST and smooth[-1] - smooth[0] > options.diverged * max(smooth[0] - min(smooth), abs(smooth[0])):
            raise Diverged

    loop._log = watched  # type: ignore[method-assign]
    ended = "the range is through"
    try:
        loop.train()
    except (Diverged, JobFailed) as end:  # a loss that is no number ends a training; all ranks see the same one
        if isinstance(end, JobFailed) and len(found) < FEWEST:
            raise
        ended = f"the loss diverged at {found[-1][0]:.3g}"
    if len(found) < FEWEST:
        raise ConfigError("lr_range.steps", options.steps, f"{len(found)} steps are too few to see anything",
                          f"set lr_range.steps to {FEWEST} at least, or a smaller lr_range.start")  # fmt: skip
    rates, losses = [lr for lr, _ in found], smoothed([loss for _, loss in found])
    lowest, steepest = suggested(rates, losses)
    if not loop.ranks.is_main:
        return
    with (work.run_dir / "lr_range.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [("lr", "loss", "smoothed"), *((lr, loss, s) for (lr, loss), s in zip(found, losses, strict=True))]
        )
    from isobatch.report.lr_range import plot

    plot(work.run_dir / "lr_range.png", found, losses, steepest)
    loop.logger.report({"samples": loop.state.samples}, {"lr_range": work.run_dir / "lr_range.png"}, {})
    log.info(
        "lr range: %s after %d steps; the loss falls fastest at %.3g and is lowest at %.3g", ended, len(found), steepest, lowest
    )
    log.info("lr range: try optimizer.lr=%.2g; lr_range.csv and lr_range.png in %s", steepest, work.run_dir)


def smoothed(losses: Sequence[float]) -> list[float]:
    """The running mean, without the pull of its beginning at 0 (as Adam's)."""
    found, mean = [], 0.0
    for step, loss in enumerate(losses, 1):
        mean = FORGETS * mean + (1 - FORGETS) * loss
        found.append(mean / (1 - FORGETS**step))
    return found


def suggested(rates: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """(rate of the lowest smoothed loss, rate at which it falls fastest by the logarithm of the rate, up to there)."""
    lowest = min(range(len(losses)), key=losses.__getitem__)
    slopes = {i: (losses[i + 1] - losses[i - 1]) / math.log(rates[i + 1] / rates[i - 1])
              for i in range(2, max(3, min(lowest, len(losses) - 1)))}  # fmt: skip
    return rates[lowest], rates[min(slopes, key=slopes.__getitem__)]
