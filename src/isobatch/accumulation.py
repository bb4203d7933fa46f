"""Group `accumulation`: micro steps of the busiest replica in one window; `auto` lets it follow from the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isobatch.errors import ConfigError
from isobatch.marks import Marks


@dataclass(frozen=True)
class Accumulation:
    steps: Any = None  # null = what follows from batch.effective and batch.micro
    name: str = "accumulation"

    def __post_init__(self) -> None:
        if self.steps is not None and (isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1):
            raise ConfigError("accumulation.steps", self.steps, "is not a positive integer",
                              "set accumulation=3 or accumulation=auto")  # fmt: skip


TABLE = {"accumulation": Accumulation}
MARKS = Marks(resume="free", speed=True)
