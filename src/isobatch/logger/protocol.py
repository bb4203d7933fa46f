"""What the rest of the project sees of a logger, and what a logger is told of its run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.run_folder import layout

if TYPE_CHECKING:
    from torch import nn

    from isobatch.logger.predictions import Predictions


@dataclass(frozen=True)
class RunInfo:
    """What is known before anything is built: the run folder, the resolved plain config, and whom it belongs to.

    Args:
        group: of runs that are shown together; None = the sweep that the folder says it belongs to.
        files: of the run folder, that say what it was.
        trains: what it does goes on with the run that it resumes; False = it is a run of its own.
    """

    run_dir: Path
    plain: Mapping[str, Any]
    group: str | None = None
    trains: bool = True
    files: Sequence[str] = (layout.CONFIG, layout.PLAN, layout.SUMMARY, layout.LOG)


SCHEME = "wandb-artifact://"  # what an address of an artifact begins with, in place of a path

Table = tuple[Sequence[str], Sequence[Sequence[Any]]]  # names of the columns, rows


class Logger:
    """The silent logger, and the protocol. Only the main rank has another one. No method blocks training.

    Attributes:
        run_id: the logger's name for the run, which a checkpoint keeps so that a resumed run goes on in it.
        how_to_look: commands or addresses that show the run, for the end of the output.
        wants_predictions: number of evaluated samples that `predictions` would like to get, at the end.
        wants_each: it would like them with every evaluation.
    """

    run_id: str | None = None
    how_to_look: Sequence[str] = ()
    wants_predictions: int = 0
    wants_each: bool = False

    def start(self, plan: Mapping[str, Any], run_id: str | None = None, samples: int = 0,
              logged: Collection[tuple[int, str]] = ()) -> None:  # fmt: skip
        """The run is known: its plan's integers, and for a resumed one its id and the samples it has consumed.

        `logged`: names of rows (run_folder.rows.name_of) that its run has from beyond those samples, before it was
        interrupted. The same training gives the same rows, so a logger that cannot take rows back leaves them out.
        """

    def log(self, row: Mapping[str, Any]) -> None:
        """One row of metrics; `samples` is the axis."""

    def watch(self, row: Mapping[str, Any], model: nn.Module) -> None:
        """After a logged step, while `.grad` still holds the window's gradient (the mean over all ranks)."""

    def predictions(self, row: Mapping[str, Any], predictions: Predictions) -> None:
        """What the model says of some evaluated samples."""

    def report(self, row: Mapping[str, Any], images: Mapping[str, Path], tables: Mapping[str, Table]) -> None:
        """Pictures (PNG files) and tables by name, once, of an evaluation."""

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """The run is over, well (0) or not; bounded in time."""
