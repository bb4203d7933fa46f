"""Group `profile`: where time and memory of a training go. Nothing of it is in the step unless it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.checks import positive, within
from isobatch.errors import ConfigError
from isobatch.marks import Marks

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from isobatch.profile.profiler import Profiler
    from isobatch.runtime.distributed import Ranks


@dataclass(frozen=True)
class NoProfile:
    """Nothing is looked at."""

    name: str = "none"
    alone: ClassVar[bool] = False  # looks at one shard at a time

    def check_with(self, config: Any) -> None:
        """Raise ConfigError for settings that it cannot be with."""

    def build(self, run_dir: Path, ranks: Ranks, device: torch.device) -> Profiler:
        from isobatch.profile.profiler import Profiler

        return Profiler()


@dataclass(frozen=True)
class Trace(NoProfile):
    """torch.profiler's trace of some steps, in RUN/profile/trace-rank0.json.gz: https://ui.perfetto.dev opens it.

    Args:
        start: steps of this process before the first one that is recorded. steps: that are recorded.
        all_ranks: a file of each rank, not of the main one alone. stacks: with the lines of Python, which cost time.
    """

    name: str = "trace"
    alone: ClassVar[bool] = True  # of one thread
    start: int = 5
    steps: int = 3
    all_ranks: bool = False
    stacks: bool = False

    def __post_init__(self) -> None:
        within("profile.start", self.start, 0, 1e12)
        positive("profile.steps", self.steps)

    def build(self, run_dir: Path, ranks: Ranks, device: torch.device) -> Profiler:
        from isobatch.profile.profiler import Profiler
        from isobatch.profile.trace import Tracer

        if not (ranks.is_main or self.all_ranks):
            return Profiler()
        return Tracer(run_dir / "profile" / f"trace-rank{ranks.rank}.json.gz", self.start, self.steps, self.stacks, device)


@dataclass(frozen=True)
class Memory(NoProfile):
    """CUDA's memory history, in RUN/profile/memory-rank0.pickle: https://pytorch.org/memory_viz opens it.

    It is written after `steps` steps, and where memory runs out.

    Args:
        events: the newest so many allocations are kept.
    """

    name: str = "memory"
    steps: int = 3
    events: int = 100_000

    def __post_init__(self) -> None:
        positive("profile.steps", self.steps)
        positive("profile.events", self.events)

    def build(self, run_dir: Path, ranks: Ranks, device: torch.device) -> Profiler:
        from isobatch.profile.trace import MemoryHistory

        if device.type != "cuda":
            raise ConfigError("profile.name", self.name, f"is CUDA's own history, and this run works on {device}",
                              "set profile=trace, which records allocations of any device")  # fmt: skip
        return MemoryHistory(run_dir / "profile" / f"memory-rank{ranks.rank}.pickle", self.steps, self.events)


@dataclass(frozen=True)
class Time(NoProfile):
    """What a step's time goes into, in every logged row: `time/data_ms`, `forward_ms`, `backward_ms`, `reduction_ms`,
    `update_ms` (means over the steps since the last row) and `perf/tflops`, of this rank.

    The host waits for the device between them, so nothing overlaps and a step takes longer than without.

    Args:
        peak_tflops: of one device, for the precision that is trained in; null = no perf/mfu.
    """

    name: str = "time"
    alone: ClassVar[bool] = True  # nothing overlaps
    peak_tflops: float | None = None

    def __post_init__(self) -> None:
        if self.peak_tflops is not None:
            positive("profile.peak_tflops", self.peak_tflops)

    def check_with(self, config: Any) -> None:
        if config.cuda_graph:
            raise ConfigError("cuda_graph", config.cuda_graph, "replays forward and backward as one; profile=time parts them",
                              "set cuda_graph=false, or profile=trace")  # fmt: skip

    def build(self, run_dir: Path, ranks: Ranks, device: torch.device) -> Profiler:
        from isobatch.profile.stopwatch import Stopwatch

        return Stopwatch(device, self.peak_tflops)


TABLE: dict[str, Any] = {"none": NoProfile, "trace": Trace, "memory": Memory, "time": Time}
MARKS = Marks("free")
