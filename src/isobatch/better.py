"""Which way a metric of an evaluation is better: stated, never guessed from a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isobatch.checks import choice
from isobatch.errors import ConfigError

# the evaluation's own metrics
KNOWN = {"eval/loss": "min", "eval/accuracy": "max", "eval/accuracy_top5": "max"}
# the same of the weights as trained, beside an average of them
KNOWN |= {metric.replace("eval/", "eval/raw_"): direction for metric, direction in KNOWN.items()}


def check(group: str, metric: str, mode: str) -> None:
    """Refuse `group.metric` and `group.mode` of which nobody can say what is better.

    Raises:
        ConfigError: the metric is none of the evaluation's own and no mode is stated.
    """
    choice(f"{group}.mode", mode, ("auto", "max", "min"))
    if mode == "auto" and metric != "auto" and metric not in KNOWN:
        raise ConfigError(f"{group}.mode", mode, f"whether more or less {metric} is better is not known",
                          f"set {group}.mode=max or {group}.mode=min") # fmt: skip


def sign(metric: str, mode: str) -> int:
    """1 where more is better, else -1."""
    return 1 if (KNOWN.get(metric) if mode == "auto" else mode) == "max" else -1


def value(group: str, metric: str, result: Mapping[str, Any]) -> float:
    """The metric in an evaluation's result.

    Raises:
        ConfigError: it has none of that name.
    """
    if metric not in result:
        raise ConfigError(f"{group}.metric", metric, "an evaluation here has no such metric",
                          f"choose one of {', '.join(k for k in result if k not in ('eval/samples', 'step'))}")  # fmt: skip
    return float(result[metric])


def check_there(group: str, metric: str, num_classes: int, averaged: bool) -> None:
    """Refuse a metric that no evaluation of this run will have, before anything is trained.

    Raises:
        ConfigError: there is none of that name.
    """
    there = ["eval/loss", *(["eval/accuracy"] if num_classes else []), *(["eval/accuracy_top5"] if num_classes > 5 else [])]
    if averaged:
        there += [key.replace("eval/", "eval/raw_") for key in there]
    value(group, metric, dict.fromkeys(there, 0.0))


def objective(result: Mapping[str, Any]) -> float | None:
    """What a sweeper optimizes, of an evaluation's result: its accuracy, for data without classes its loss."""
    return result.get("eval/accuracy", result.get("eval/loss"))
