"""Group `checkpoint`: complete or absent, plain data, loadable in torch's safe mode."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.checks import positive
from isobatch.errors import ConfigError

if TYPE_CHECKING:
    from isobatch.distributed import Ranks
    from isobatch.state import TrainState


@dataclass(frozen=True)
class Checkpoint:
    """
    Args:
        every: steps between checkpoints (null: only at the end, at the best evaluation and on a stop).
        keep: numbered checkpoints that are kept beside `last` and `best`.
        best: the metric that `best` follows.
    """

    name: str = "checkpoint"
    every: int | None = None
    keep: int = 1
    best: str | None = "eval/accuracy"

    def __post_init__(self) -> None:
        if self.every is not None:
            positive("checkpoint.every", self.every)
        positive("checkpoint.keep", self.keep)

    def build(self, run_dir: Path, ranks: Ranks, plain: dict[str, Any]) -> Checkpointer:
        return Checkpointer(self, run_dir, ranks, plain)


class Checkpointer:
    """Saves and finds checkpoints of one run folder. All ranks call every method alike; the main rank writes."""

    def __init__(self, options: Checkpoint, run_dir: Path, ranks: Ranks, plain: dict[str, Any]):
        self.options, self.folder, self.ranks, self.plain = options, run_dir / "checkpoints", ranks, plain
        self.allowed = True

    def due(self, step: int) -> bool:
        return self.options.every is not None and step % self.options.every == 0

    def forbid(self) -> None:
        """The state is damaged (not finite): keep what is on disk."""
        self.allowed = False

    def save(self, state: TrainState, improved: list[str]) -> None:
        """Write `last`, and `best` too when the metric that it follows is among `improved`."""
        if not self.allowed or not self.ranks.is_main:
            return
        import torch

        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"tmp-{os.getpid()}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        with (part / "state.pt").open("wb") as file:
            torch.save({**state.state_dict(), "config": self.plain}, file)
            file.flush()
            os.fsync(file.fileno())
        if self.options.best in improved:
            shutil.copytree(part, part.with_name("tmp-best"), dirs_exist_ok=True)
            self._place(part.with_name("tmp-best"), "best")
        self._place(part, "last")

    def _place(self, part: Path, name: str) -> None:
        target, old = self.folder / name, self.folder / f"tmp-old-{name}"
        if target.exists():
            os.replace(target, old)
        os.replace(part, target)
        shutil.rmtree(old, ignore_errors=True)

    def wait(self) -> None:
        """Return when everything saved is complete on disk."""


def load(run: str | Path, which: str = "last") -> dict[str, Any]:
    """The saved state of a run folder, as plain data on the CPU.

    Raises:
        ConfigError: no such run, no checkpoint in it, or one that torch's safe mode cannot read.
    """
    import torch

    path = Path(run) / "checkpoints" / which / "state.pt"
    if not path.is_file():
        raise ConfigError("resume", run, "holds no checkpoint", "set resume to a run folder with checkpoints/last")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError("resume", run, f"its checkpoint cannot be read ({error})", "use another run folder") from None
    return state


TABLE: dict[str, Any] = {"checkpoint": Checkpoint}
