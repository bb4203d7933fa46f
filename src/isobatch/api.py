"""isobatch in a notebook or a script: `train`, `load`, `read`. The same code path as the command. See docs/python.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.errors import ConfigError
from isobatch.run_folder import layout
from isobatch.run_folder.reading import Missing, Unreadable, read_mapping
from isobatch.run_folder.rows import rows

if TYPE_CHECKING:
    from isobatch.trained import TrainedModel


@dataclass(frozen=True)
class Result:
    """What a run has left in `folder`; read when it is asked for.

    Attributes:
        rows: of metrics.jsonl, a dict per logged step and per evaluation.
        summary: how it ended. plan: its integers. config: its settings, resolved.
        model: its best weights, else the last, in evaluation mode (see `load`).
    """

    folder: Path

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return read(self.folder)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return dict(read_mapping(self.folder, layout.SUMMARY))

    @cached_property
    def plan(self) -> dict[str, Any]:
        return dict(read_mapping(self.folder, layout.PLAN))

    @cached_property
    def config(self) -> dict[str, Any]:
        return dict(read_mapping(self.folder, layout.CONFIG))

    @cached_property
    def model(self) -> TrainedModel:
        return load(self.folder)


def train(overrides: Iterable[str] = ()) -> Result:
    """Do what `python train.py OVERRIDES` does (any `task`), in this process; ranks of `parallel.nproc` are its children.

    Raises:
        ConfigError: refused, nothing was trained. ValueError: Hydra refuses a setting. JobFailed: it failed.
        KeyboardInterrupt: Ctrl-C, after a checkpoint.
    """
    from isobatch.cli.in_process import run_job
    from isobatch.runtime import kept_memory

    if isinstance(overrides, str):
        raise TypeError("overrides are a list: isobatch.train(['epochs=3'])")
    try:
        return Result(run_job(list(overrides)).resolve())
    finally:
        kept_memory.give_back()


def load(run: str | Path, checkpoint: str = "best", weights: str = "auto") -> TrainedModel:
    """A run's model in evaluation mode, on the CPU, with the preprocessing of its evaluation.

    Args:
        run: a run folder, or one of its checkpoints.
        checkpoint: best (the last, where the run has no best), last, step-N, or mean (of all step-N).
        weights: ema, raw, or auto as in an evaluation.
    Raises:
        ConfigError: there is no such checkpoint, or its model is one of your own and not registered.
    """
    from isobatch.trained import load_run

    return load_run(Path(run), checkpoint, weights)


def read(run: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, in order. A row that a kill has cut off is left out.

    Raises:
        ConfigError: it is no run folder with metrics.
    """
    folder = Path(run)
    try:
        return [{key: _number(value) for key, value in row.items()} for row in rows(folder)]
    except Missing:
        raise ConfigError("run", folder, "holds no metrics.jsonl", "name a run folder (outputs/<date>/<time>)") from None
    except Unreadable as problem:
        raise ConfigError("run", folder, f"its metrics.jsonl {problem}", "name another run folder") from None


def _number(value: Any) -> Any:
    """JSON has no NaN: what is not finite is written as a word."""
    return float(value) if value in ("nan", "inf", "-inf") else value
