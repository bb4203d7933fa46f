"""Group `logger`: where metrics go besides metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """What a logger is told of a run: its folder, its resolved plain config, its plan."""

    run_dir: Path
    plain: dict[str, Any]
    plan: dict[str, Any]
    run_id: str | None = None


class Logger:
    """The silent logger, and the protocol. Only the main rank has another one. No method blocks training."""

    run_id: str | None = None

    def log(self, row: dict[str, Any]) -> None:
        """One row of metrics; `samples` is the axis."""

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """The run is over; bounded in time."""


@dataclass(frozen=True)
class NoLogger:
    name: str = "none"

    def build(self, info: RunInfo) -> Logger:
        return Logger()


TABLE: dict[str, Any] = {"none": NoLogger}
