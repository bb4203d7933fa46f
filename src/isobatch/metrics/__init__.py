"""Group `metrics`: what an evaluation says beside the loss. Every sample counts once, and the value is the same at any number
of ranks: sums by batch, whole counts, or rows put in the order of the samples.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.errors import ConfigError
from isobatch.marks import Marks, option

if TYPE_CHECKING:
    from isobatch.metrics.base import Metric

PACKAGES = {"MeanAveragePrecision": ("faster_coco_eval", "pycocotools")}  # of which one has to be there
OWN: dict[str, Callable[..., Any]] = {}  # isobatch.register("metric", name, f)


@dataclass(frozen=True)
class NoMetrics:
    """The loss alone."""

    name: str = "none"

    def build(self, output: Any, targets: Any, num_classes: int, ignored: int | None) -> list[Metric]:
        """The metrics of an evaluation whose forward gives `output` for samples with `targets`.

        Args:
            ignored: the label that the loss leaves out; None: it says nothing of one.
        Raises:
            ConfigError: one does not exist, or cannot be made for such outputs.
        """
        return []


@dataclass(frozen=True)
class Auto(NoMetrics):
    """What suits the task, told by outputs and targets. One label of a sample: accuracy, top-5; several labels: mean average
    precision and F1; numbers: MAE, RMSE, R2; masks: mean IoU and accuracy of pixels; tokens: accuracy and perplexity.

    Args:
        names: further ones, each one of your own (isobatch.register("metric", ...)) or a class of torchmetrics.
        kwargs: name -> arguments.
    """

    name: str = "auto"
    names: list[str] = option(factory=list)
    kwargs: dict[str, Any] = option(factory=dict)

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise ConfigError("metrics.names", self.names, "names one twice", "name each once")
        for name in set(self.names) & set(PACKAGES):
            if not any(map(importlib.util.find_spec, PACKAGES[name])):
                raise ConfigError("metrics.names", name, f"needs the package {' or '.join(PACKAGES[name])}",
                                  "pip install 'isobatch[detection]'")  # fmt: skip
        for name, value in self.kwargs.items():
            if name not in self.names or not isinstance(value, dict):
                raise ConfigError(
                    f"metrics.kwargs.{name}",
                    value,
                    "is no mapping of arguments of one of metrics.names",
                    "set +metrics.kwargs.MulticlassF1Score.average=macro, and metrics.names=[MulticlassF1Score]",
                )

    def build(self, output: Any, targets: Any, num_classes: int, ignored: int | None) -> list[Metric]:
        from isobatch.metrics import auto

        return [*auto.build(output, targets, num_classes, ignored), *self._named(output, targets, num_classes, ignored)]

    def _named(self, output: Any, targets: Any, num_classes: int, ignored: int | None) -> list[Metric]:
        from isobatch.metrics import named

        return [named.build(name, self.kwargs.get(name, {}), output, targets, num_classes, ignored) for name in self.names]


@dataclass(frozen=True)
class Named(Auto):
    """The named ones alone."""

    name: str = "torchmetrics"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.names:
            raise ConfigError("metrics.names", self.names, "names no metric",
                              "set metrics.names=[MulticlassF1Score], or metrics=none")  # fmt: skip

    def build(self, output: Any, targets: Any, num_classes: int, ignored: int | None) -> list[Metric]:
        return self._named(output, targets, num_classes, ignored)


TABLE: dict[str, Any] = {"auto": Auto, "torchmetrics": Named, "none": NoMetrics}
MARKS = Marks(resume="free")
