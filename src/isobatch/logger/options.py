"""Group `logger`: where metrics go besides metrics.jsonl."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from isobatch.checks import choice, positive
from isobatch.errors import ConfigError
from isobatch.logger.protocol import Logger, RunInfo
from isobatch.marks import option

ALERTS = ("failed", "nonfinite", "finished")
MODES = ("auto", "online", "offline", "disabled")


class LoggerOptions(Protocol):
    @property
    def name(self) -> str: ...

    def check(self) -> None:
        """Raise ConfigError for what cannot work, before data or model is built. Cheap: imports no logger."""

    def build(self, info: RunInfo) -> Logger:
        """Start whatever takes time; the run itself begins with Logger.start."""


@dataclass(frozen=True)
class NoLogger:
    """metrics.jsonl and summary.json only."""

    name: str = "none"

    def check(self) -> None:
        """Refuse what cannot work, before data or model is built. Cheap: imports no logger.

        Raises:
            ConfigError: with what to set instead.
        """

    def build(self, info: RunInfo) -> Logger:
        """Start whatever takes time; the run itself begins with Logger.start."""
        return Logger()


@dataclass(frozen=True)
class Histograms:
    """
    Args:
        histograms: none, gradients, weights or all; of every parameter, at logged steps.
        histograms_every: logged steps from one set of histograms to the next.
    """

    histograms: str = "none"
    histograms_every: int = 10

    def __post_init__(self) -> None:
        choice("logger.histograms", self.histograms, ("none", "gradients", "weights", "all"))
        positive("logger.histograms_every", self.histograms_every)


@dataclass(frozen=True)
class WeightsAndBiases(Histograms):
    """
    Args:
        mode: auto goes online if a key is found and the server answers within 3 s, else offline; nothing ever asks.
        run_name: null names a run after the overrides that make it differ from the other jobs of its sweep.
        predictions: evaluated images shown with what the model says of them.
        predictions_at: the end, or each evaluation.
        log_checkpoints: none, best or last, as an artifact.
        registry: collection of W&B's registry that the artifact is linked to, `wandb-registry-model/NAME`.
        code: folder whose source files (Python, YAML, TOML, notebooks) the run keeps; null = none.
        system_metrics: load, memory and temperatures of the machine, sampled by W&B.
        alerts: of `failed`, `nonfinite` (a loss that is no number) and `finished`: W&B sends them as you have set up there.
        save_files: config.yaml, plan.json, summary.json and train.log as files of the run, below isobatch/.
        finish_timeout_s: longest wait for uploads at the end of a run; what is left stays on disk for `wandb sync`.
    """

    name: str = "wandb"
    mode: str = "auto"
    project: str = "isobatch"
    entity: str | None = None
    run_name: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    predictions: int = 0
    predictions_at: str = "end"
    log_checkpoints: str = "none"
    registry: str | None = None
    code: str | None = option(None, path="file")
    system_metrics: bool = True
    alerts: list[str] = field(default_factory=list)
    save_files: bool = True
    finish_timeout_s: float = 15.0

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("logger.mode", self.mode, MODES)
        choice("logger.predictions_at", self.predictions_at, ("end", "evaluations"))
        choice("logger.log_checkpoints", self.log_checkpoints, ("none", "best", "last"))
        positive("logger.finish_timeout_s", self.finish_timeout_s)
        for name in self.alerts:
            choice("logger.alerts", name, ALERTS)
        if self.predictions < 0:
            raise ConfigError("logger.predictions", self.predictions, "is negative", "set logger.predictions=0 or more")
        if self.predictions_at == "evaluations" and not self.predictions:
            raise ConfigError("logger.predictions_at", "evaluations", "none are asked for", "set logger.predictions=32 too")
        if self.registry is not None and self.log_checkpoints == "none":
            raise ConfigError("logger.registry", self.registry, "no checkpoint is uploaded that could be linked there",
                              "set logger.log_checkpoints=best too")  # fmt: skip
        if self.registry is not None and self.registry.count("/") not in (1, 2):
            raise ConfigError("logger.registry", self.registry, "is no collection of a registry",
                              "set logger.registry=wandb-registry-model/NAME")  # fmt: skip

    def check(self) -> None:
        from isobatch.logger import access

        if access.resolve(self.mode).mode == "disabled":
            return
        need("wandb", "wandb", "pip install wandb")
        if self.code is not None and not Path(self.code).is_dir():
            raise ConfigError("logger.code", self.code, "is no folder", "set logger.code=. or to another folder")
        if self.mode == "online" and access.find_key() is None:
            raise ConfigError("logger.mode", "online", "no W&B key was found, and nothing here asks for one",
                              "set WANDB_API_KEY or run `wandb login`, or set logger.mode=offline")  # fmt: skip

    def build(self, info: RunInfo) -> Logger:
        from isobatch.logger import access
        from isobatch.logger.weights_and_biases import WeightsAndBiasesLogger

        found = access.resolve(self.mode)
        return Logger() if found.mode == "disabled" else WeightsAndBiasesLogger(self, info, found)


@dataclass(frozen=True)
class TensorBoard(Histograms):
    """
    Args:
        flush_s: seconds after which rows are on disk at the latest.
    """

    name: str = "tensorboard"
    flush_s: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("logger.flush_s", self.flush_s)

    def check(self) -> None:
        need("tensorboard", "tensorboard", "pip install 'isobatch[tensorboard]'")

    def build(self, info: RunInfo) -> Logger:
        from isobatch.logger.tensorboard import TensorBoardLogger

        return TensorBoardLogger(self, info)


@dataclass(frozen=True)
class Trackio:
    """
    Args:
        project: runs of one project are shown together.
    """

    name: str = "trackio"
    project: str = "isobatch"

    def check(self) -> None:
        need("trackio", "trackio", "pip install 'isobatch[trackio]'")

    def build(self, info: RunInfo) -> Logger:
        from isobatch.logger.trackio import TrackioLogger

        return TrackioLogger(self, info)


@dataclass(frozen=True)
class MLflow:
    """
    Args:
        project: the experiment.
        tracking_uri: of the server; null = MLFLOW_TRACKING_URI.
    """

    name: str = "mlflow"
    project: str = "isobatch"
    tracking_uri: str | None = None

    def check(self) -> None:
        need("mlflow", "mlflow", "pip install 'isobatch[mlflow]'")
        if not (self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")):
            raise ConfigError("logger.tracking_uri", None, "names no server, and neither does MLFLOW_TRACKING_URI",
                              "set logger.tracking_uri=http://HOST:5000")  # fmt: skip

    def build(self, info: RunInfo) -> Logger:
        from isobatch.logger.mlflow import MLflowLogger

        return MLflowLogger(self, info)


@dataclass(frozen=True)
class CsvRowsOptions:
    """metrics.csv."""

    name: str = "csv"

    def check(self) -> None:
        """There is nothing that could be missing."""

    def build(self, info: RunInfo) -> Logger:
        from isobatch.logger.csv_rows import CsvLogger

        return CsvLogger(info)


@dataclass(frozen=True)
class SeveralOptions(WeightsAndBiases, TensorBoard, MLflow):
    """More than one logger at once; each takes its own options from here.

    Args:
        loggers: names of this group.
    """

    name: str = "several"
    loggers: list[str] = field(default_factory=lambda: ["wandb", "tensorboard"])

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.loggers:
            raise ConfigError("logger.loggers", [], "names no logger", "set logger.loggers=[wandb,tensorboard], or logger=none")
        for name in self.loggers:
            choice("logger.loggers", name, [key for key in TABLE if key != "several"])

    def check(self) -> None:
        for name in self.loggers:
            TABLE[name].check(self)

    def build(self, info: RunInfo) -> Logger:
        from isobatch.logger.several import SeveralLoggers

        return SeveralLoggers([TABLE[name].build(self, info) for name in self.loggers])


def need(module: str, choice_: str, install: str) -> None:
    """Refuse `logger=choice_` where its package is missing.

    Raises:
        ConfigError: with the way to install it.
    """
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # something put None in its place
        spec = None
    if spec is None or spec.origin is None:  # without an origin it is only a folder of that name
        raise ConfigError("logger", choice_, f"the package {module} is not installed",
                          f"{install}, or set logger=none")  # fmt: skip


TABLE: dict[str, Any] = {
    "none": NoLogger,
    "wandb": WeightsAndBiases,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "mlflow": MLflow,
    "csv": CsvRowsOptions,
    "several": SeveralOptions,
}
