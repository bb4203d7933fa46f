"""What an audit sees of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from isobatch.batch_plan import Window
    from isobatch.data.feed import MicroBatch, WindowData
    from isobatch.run_folder.files import RunFiles
    from isobatch.runtime.distributed import Ranks
    from isobatch.train.lanes import LaneSteps
    from isobatch.train.state import TrainState
    from isobatch.train.step import Parts

Hook = Callable[["TrainState", "Parts", Iterator["WindowData"]], Iterator["WindowData"]]


class ShardSource(Protocol):
    """Where an auditor finds another rank's shard."""

    def alone(self, window: Window, shard: int) -> MicroBatch: ...


class Saves(Protocol):
    """The checkpoints."""

    inspect: Callable[[TrainState], None] | None

    def save(self, state: TrainState, is_best: bool = False) -> None: ...

    def wait(self) -> None: ...


class Node(Protocol):
    """The machine of this rank, as a part of its launch.

    hindrance: why the launch cannot go on without it; "" = it can. withdraw: take it out; what became of it, in words.
    """

    def hindrance(self) -> str: ...

    def withdraw(self) -> str: ...


class Training(Protocol):
    """The loop, before it begins."""

    @property
    def ranks(self) -> Ranks: ...

    @property
    def feed(self) -> ShardSource: ...

    @property
    def checkpointer(self) -> Any: ...

    @property
    def files(self) -> RunFiles: ...

    @property
    def lane_steps(self) -> LaneSteps | None: ...
