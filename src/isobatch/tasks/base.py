"""What a task is: how much of a run is built for it, and what it then does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from isobatch.errors import ConfigError
from isobatch.runtime import garbage

if TYPE_CHECKING:
    from isobatch.checkpoint.reading import Saved
    from isobatch.config import Config
    from isobatch.data import DataInfo
    from isobatch.runtime.distributed import Ranks
    from isobatch.train.loop import Loop


@dataclass(frozen=True)
class Work:
    """A run that is assembled, as its task gets it on every rank.

    Args:
        loop: ready for its next window, with state, feed, evaluator, logger and files.
        saved: the checkpoint that the state is from; None = the run is new.
        earlier: what a run that is complete already has reached; None = there is something left to do.
    """

    config: Config
    run_dir: Path
    loop: Loop
    info: DataInfo
    saved: Saved | None
    earlier: dict[str, float] | None


class Task:
    """One value of `task`. A new one is a class with these attributes and a line in the table.

    Attributes:
        built: how far a run gets for it. `nothing`: it works on the files of a run, by the main rank alone (`alone`);
            `model`: it takes a trained model and builds what it needs itself, on every rank (`apply`);
            `plan`: it ends when the plan is shown; `loop`: everything is assembled (`perform`).
        trains: it consumes windows: a resume keeps the contract, this folder's own checkpoints and rows are gone on with,
            and what it does is a continuation of the run that it resumes.
        needs_run: `resume` has to name the run that it is about.
        reads_data: the data has to be there.
        logs: it has a logger.
        one_process: it starts no ranks of its own, whatever `parallel` asks for.
        splits: which `evaluate.split` may name.
    """

    name: ClassVar[str]
    built: ClassVar[Literal["nothing", "model", "plan", "loop"]] = "loop"
    trains: ClassVar[bool] = False
    needs_run: ClassVar[bool] = False
    reads_data: ClassVar[bool] = True
    logs: ClassVar[bool] = True
    one_process: ClassVar[bool] = False
    splits: ClassVar[tuple[str, ...]] = ("eval",)

    def check(self, config: Config) -> None:
        """Refuse what cannot be done, before anything starts. Imports nothing heavy.

        Raises:
            ConfigError: what is missing.
        """
        if self.needs_run and config.resume is None:
            raise ConfigError("resume", None, f"task={self.name} needs a run to {self.name}", "set resume=<run folder>")

    def settled(self, config: Config, ranks: Ranks) -> Config:
        """`config` as the task needs it: what it decides itself, before anything is built. On every rank alike."""
        return config

    def alone(self, config: Config, run_dir: Path) -> None:
        """On the main rank, where nothing is built."""
        raise AssertionError(f"task={self.name} is built as {self.built}")

    def apply(self, config: Config, run_dir: Path, ranks: Ranks) -> None:
        """On every rank, where the task builds what it needs."""
        raise AssertionError(f"task={self.name} is built as {self.built}")

    def without_run(self, config: Config, run_dir: Path, ranks: Ranks) -> bool:
        """Do it where no run has to be built for it; returns whether it is done."""
        if self.built not in ("nothing", "model"):
            return False
        garbage.on()
        if self.built == "model":
            self.apply(config, run_dir, ranks)
        elif ranks.is_main:
            self.alone(config, run_dir)
        return True

    def perform(self, work: Work) -> None:
        """On every rank, when all is assembled."""
        raise AssertionError(f"task={self.name} is built as {self.built}")


def needs_weights(task: Task, config: Config) -> None:
    """Refuse a task that is about a trained model where none is named.

    Raises:
        ConfigError: with the three ways to name one.
    """
    if config.resume is None and getattr(config.model, "first_weights", None) is None:
        raise ConfigError("resume", None, f"task={task.name} needs a run to {task.name}, or trained weights",
                          "set resume=<run folder>, model.checkpoint_path=<file> or model.pretrained=true")  # fmt: skip
