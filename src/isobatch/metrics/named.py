"""Metrics by name: one's own, and torchmetrics'. Whole counts are added; all else gets the rows in the order of the samples.

torchmetrics' own way over ranks depends on which rank had which sample wherever a state is a float or a list. So only states
that are whole numbers, sums or extremes, are added up on the ranks; any other metric sees all batches in order, on the main
rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobatch.errors import ConfigError, JobFailed, kind_and_reason
from isobatch.metrics import OWN, PACKAGES
from isobatch.metrics.base import TORCHS, Metric, kind, probabilities
from isobatch.runtime.distributed import Ranks
from isobatch.runtime.trees import mapped

ROOMS = (
    "classification",
    "regression",
    "segmentation",
    "text",
    "image",
    "retrieval",
    "clustering",
    "nominal",
    "shape",
    "detection",
)


def labels(count: int) -> list[Metric]:
    """Of several labels of a sample: map (mean average precision over the labels) and f1 (the same mean, above 0.5)."""
    made = lambda name: _made(name, {}, count, None)  # noqa: E731
    found: list[Metric] = [Library("map", lambda: made("MultilabelAveragePrecision"), "labels"),
                           Library("f1", lambda: made("MultilabelF1Score"), "labels")]  # fmt: skip
    for metric in found:
        metric.names = (metric.name,)  # type: ignore[attr-defined]
    return found


def build(name: str, kwargs: dict[str, Any], output: Any, targets: Any, num_classes: int, ignored: int | None) -> Metric:
    """
    Raises:
        ConfigError: there is none of that name, or it does not take these arguments.
    """
    of = kind(output, targets, num_classes)
    own = OWN.get(name)
    if own is not None and not inspect.isclass(own):
        return Rows(name, own, kwargs)
    count = num_classes or (output.shape[1] if isinstance(output, Tensor) and output.ndim > 1 else 0)
    if own is None and _class(name).__module__.startswith("torchmetrics.detection"):
        from isobatch.metrics import boxes

        return boxes.Boxes(name, lambda: _made(name, kwargs, count, None), "boxes")
    left_out = ignored if ignored is not None or of in ("classes", "labels", "numbers", "other") else TORCHS
    return Library(name, lambda: _made(name, kwargs, count, left_out), of)


def _made(name: str, kwargs: dict[str, Any], count: int, ignored: int | None) -> Any:
    """A new metric of torchmetrics (or a registered class like it), with the number of classes where it asks for one."""
    found = OWN.get(name) or _class(name)
    takes = inspect.signature(found).parameters
    given: dict[str, Any] = {key: count for key in ("num_classes", "num_labels") if key in takes}
    if ignored is not None and "ignore_index" in takes:
        given["ignore_index"] = ignored
    if "backend" in takes and name in PACKAGES:
        given["backend"] = next(filter(importlib.util.find_spec, PACKAGES[name]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return alone(found(**{**given, **kwargs}))
    except Exception as error:
        raise ConfigError(
            f"metrics.kwargs.{name}",
            kwargs,
            f"{name} cannot be made ({kind_and_reason(error, 160)})",
            "give it what its documentation asks for",
        ) from None


def _class(name: str) -> Any:
    import torchmetrics

    for room in ("", *(f".{room}" for room in ROOMS)):
        found = getattr(importlib.import_module(f"torchmetrics{room}"), name, None)
        if inspect.isclass(found) and issubclass(found, torchmetrics.Metric):
            return found
    raise ConfigError("metrics.names", name, "is no class of torchmetrics, and no metric of that name is registered",
                      "see torchmetrics' documentation, or type imports=[module] where yours is")  # fmt: skip


class Gathered(Metric):
    """Keeps what it is shown, and puts it in order on the main rank."""

    def begin(self) -> None:
        self.kept: list[tuple[int, Any, Any]] = []

    def fill(self, slot: Tensor, number: int, output: Any, targets: Any) -> None:
        self.kept.append((number, *mapped(lambda t: t.detach().cpu(), (output, targets))))

    def all(self, ranks: Ranks) -> list[tuple[Any, Any]] | None:
        """Outputs and targets of all batches in order, on the main rank; None on others. A collective."""
        parts = ranks.gather_objects(self.kept)
        self.kept = []
        if parts is None:
            return None
        return [(output, targets) for _, output, targets in sorted((b for part in parts for b in part), key=lambda b: b[0])]


class Rows(Gathered):
    """`f(outputs, targets, **kwargs)` -> a number or name -> number, of all samples in their order."""

    def __init__(self, name: str, function: Callable[..., Any], kwargs: dict[str, Any]):
        self.name, self.function, self.kwargs = name, function, kwargs

    def values(self, totals: list[float], ranks: Ranks) -> dict[str, float]:
        batches = self.all(ranks)

        def value() -> dict[str, float]:
            outputs, targets = (joined(column) for column in zip(*batches or [], strict=True))
            return named(self.name, self.function(outputs, targets, **self.kwargs))

        return _told(ranks, value)


def joined(batches: tuple[Any, ...]) -> Any:
    """The trees of all batches as one: tensors end to end, where they fit; lists of what else there is."""
    one = batches[0]
    if isinstance(one, Tensor):
        fits = one.ndim and all(batch.shape[1:] == one.shape[1:] for batch in batches)
        return torch.cat(batches) if fits else [row for batch in batches for row in batch]
    if isinstance(one, dict):
        return {key: joined(tuple(batch[key] for batch in batches)) for key in one}
    if isinstance(one, tuple):
        members = [joined(column) for column in zip(*batches, strict=True)]
        return type(one)(*members) if hasattr(one, "_fields") else tuple(members)
    return [row for batch in batches for row in batch] if isinstance(one, list) else list(batches)


class Library(Gathered):
    """A metric of torchmetrics. It gets probabilities (`kind`), never a batch's guess whether these are some."""

    def __init__(self, name: str, make: Callable[[], Any], of: str):
        self.name, self.make, self.of = name, make, of
        made = make()
        self.counts = countable(made)
        self.reduce = dict(made._reductions)

    def begin(self) -> None:
        super().begin()
        self.metric = self.make()

    def fill(self, slot: Tensor, number: int, output: Any, targets: Any) -> None:
        output = probabilities(output, self.of)
        if self.counts:
            self._update(self.metric.to(slot.device), output, targets)
        else:
            super().fill(slot, number, output, targets)

    def _update(self, metric: Any, output: Any, targets: Any) -> None:
        if self.of == "labels":
            targets = targets.long()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                metric.update(output, targets)
        except Exception as error:
            raise JobFailed(
                f"metrics.names: {self.name} cannot take such outputs and targets ({kind_and_reason(error)}); "
                "leave it out, or write your own"
            ) from error

    def values(self, totals: list[float], ranks: Ranks) -> dict[str, float]:
        if self.counts:
            for state, reduction in self.reduce.items():
                ranks.all_reduce(getattr(self.metric, state), OPERATIONS[reduction.__name__])
            self.metric._update_count = max(1, self.metric._update_count)  # a rank without a batch has the states too
            return _told(ranks, lambda: self._value(self.metric))
        batches = self.all(ranks)

        def value() -> dict[str, float]:
            for output, targets in batches or ():
                self._update(self.metric, output, targets)
            return self._value(self.metric)

        return _told(ranks, value)

    def _value(self, metric: Any) -> dict[str, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return named(self.name, metric.compute())


def alone(metric: Any) -> Any:
    """`metric`, which asks no other rank: what it is to know is here when it computes."""
    for part in metric.modules() if hasattr(metric, "modules") else ():
        part.sync_on_compute = part._to_sync = False
    return metric


OPERATIONS = {"dim_zero_sum": "sum", "dim_zero_max": "max", "dim_zero_min": "min"}


def countable(metric: Any) -> bool:
    """Whether all that `metric` keeps are whole numbers that are added, or extremes: no order and no grouping can matter."""
    for state, reduction in metric._reductions.items():
        value, operation = getattr(metric, state), OPERATIONS.get(getattr(reduction, "__name__", ""))
        if not isinstance(value, Tensor) or operation is None or (value.is_floating_point() and operation == "sum"):
            return False
    return bool(metric._reductions)


def _told(ranks: Ranks, value: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What the main rank finds, on all of them; what it raises too. A collective."""
    found: Any = None
    if ranks.is_main:
        try:
            found = value()
        except Exception as error:
            found = error if isinstance(error, JobFailed) else JobFailed(
                f"a metric could not be computed ({kind_and_reason(error)})")  # fmt: skip
    found = ranks.broadcast_object(found)
    if isinstance(found, Exception):
        raise found
    return found  # type: ignore[no-any-return]


def named(name: str, value: Any) -> dict[str, float]:
    """A metric's result as numbers by name: one number, several, or name -> number.

    Raises:
        JobFailed: it is none of these.
    """
    if isinstance(value, dict):
        found = {f"{key}": number for key, inner in value.items() for number in [_number(inner)] if number is not None}
    elif isinstance(value, Tensor) and value.ndim == 1:
        found = {f"{name}_{i}": v for i, v in enumerate(value.double().tolist())}
    else:
        found = {name: _number(value)}  # type: ignore[dict-item]
        if found[name] is None:
            raise JobFailed(f"metric {name} gives a {type(value).__name__}, and no number: return one, or name -> number")
    return found  # type: ignore[return-value]


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
