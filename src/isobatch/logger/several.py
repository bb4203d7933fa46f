"""Several loggers at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.logger.protocol import Logger, Table

if TYPE_CHECKING:
    from torch import nn

    from isobatch.logger.predictions import Predictions


class SeveralLoggers(Logger):
    """Passes everything on to each of `loggers`."""

    def __init__(self, loggers: Sequence[Logger]):
        self.loggers = loggers
        self.wants_predictions = max((logger.wants_predictions for logger in loggers), default=0)
        self.wants_each = any(logger.wants_each for logger in loggers)

    @property
    def how_to_look(self) -> list[str]:  # type: ignore[override]
        return [line for logger in self.loggers for line in logger.how_to_look]

    def start(self, plan: Mapping[str, Any], run_id: str | None = None, samples: int = 0,
              logged: Collection[tuple[int, str]] = ()) -> None:  # fmt: skip
        for logger in self.loggers:
            logger.start(plan, run_id, samples, logged)
            run_id = run_id or logger.run_id  # one id for all: a checkpoint keeps one
        self.run_id = next((logger.run_id for logger in self.loggers if logger.run_id), None)

    def log(self, row: Mapping[str, Any]) -> None:
        for logger in self.loggers:
            logger.log(row)

    def watch(self, row: Mapping[str, Any], model: nn.Module) -> None:
        for logger in self.loggers:
            logger.watch(row, model)

    def predictions(self, row: Mapping[str, Any], predictions: Predictions) -> None:
        for logger in self.loggers:
            logger.predictions(row, predictions)

    def report(self, row: Mapping[str, Any], images: Mapping[str, Path], tables: Mapping[str, Table]) -> None:
        for logger in self.loggers:
            logger.report(row, images, tables)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        for logger in self.loggers:
            logger.finish(summary, exit_code)
