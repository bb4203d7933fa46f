"""Which way a metric of an evaluation is better: stated, never guessed from a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isobatch.checks import choice
from isobatch.errors import ConfigError

MAIN = ("eval/accuracy", "eval/loss")  # where nobody names a metric, the first of these that an evaluation has counts

# the evaluation's own metrics
KNOWN = {"eval/loss": "min", "eval/accuracy": "max", "eval/accuracy_top5": "max", "eval/map": "max", "eval/f1": "max",
         "eval/mae": "min", "eval/rmse": "min", "eval/r2": "max", "eval/mean_iou": "max", "eval/pixel_accuracy": "max",
         "eval/perplexity": "min"}  # fmt: skip
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
                          f"set {group}.mode=max or {group}.mode=min")  # fmt: skip


def sign(metric: str, mode: str) -> int:
    """1 where more is better, else -1."""
    return 1 if (KNOWN.get(metric) if mode == "auto" else mode) == "max" else -1


def value(group: str, metric: str, result: Mapping[str, Any], key: str = "metric") -> float:
    """The metric in an evaluation's result.

    Raises:
        ConfigError: it has none of that name.
    """
    if metric not in result:
        raise ConfigError(f"{group}.{key}", metric, "an evaluation here has no such metric",
                          f"choose one of {', '.join(k for k in result if k not in ('eval/samples', 'step'))}")  # fmt: skip
    return float(result[metric])


def there(names: Iterable[Sequence[str]], averaged: bool) -> list[str] | None:
    """The metrics of this run's evaluations, given each metric's `names`; None: not all are known before the first one.

    Args:
        averaged: there is an average of the weights, so that the raw ones have metrics of their own.
    """
    known = list(names)
    if not all(known):
        return None
    found = ["eval/loss", *(f"eval/{name}" for part in known for name in part)]
    return found + [key.replace("eval/", "eval/raw_") for key in found if averaged]


def check_there(group: str, metric: str, metrics: Sequence[str] | None, key: str = "metric") -> None:
    """Refuse a metric that no evaluation of this run will have (`metrics`, as of `there`), before anything is trained.

    Raises:
        ConfigError: there is none of that name.
    """
    if metrics is not None:
        value(group, metric, dict.fromkeys(metrics, 0.0), key)


def main(result: Mapping[str, Any]) -> str:
    """The metric of an evaluation that counts where nobody has named one."""
    return next((metric for metric in MAIN if metric in result), MAIN[-1])


def objective(result: Mapping[str, Any], metric: str | None) -> float | None:
    """What a sweeper optimizes: `metric` of an evaluation; None: the main one."""
    if metric is None:
        return result.get(main(result))
    return value("sweep", metric, result, "objective") if result else None
