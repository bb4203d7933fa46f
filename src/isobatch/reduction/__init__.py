"""Group `reduction`: how the shards' gradients, losses and batch-norm statistics become the window's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.checks import choice, positive
from isobatch.marks import Marks, option

if TYPE_CHECKING:
    import torch

    from isobatch.batch_plan import BatchPlan
    from isobatch.parallel.base import Single
    from isobatch.precision.masters import WorkingCopy
    from isobatch.reduction.fast import FastReducer
    from isobatch.reduction.protocol import Reducer
    from isobatch.runtime.distributed import Ranks


@dataclass(frozen=True)
class Fast:
    """torch's own DDP or DataParallel: one overlapped gradient all-reduce a window; plans agree up to rounding."""

    name: str = "fast"
    exact = False

    def build(self, working: WorkingCopy, strategy: Single, plan: BatchPlan, ranks: Ranks,
              device: torch.device) -> FastReducer:  # fmt: skip
        from isobatch.reduction.fast import FastReducer

        return FastReducer(working.module, strategy, plan, ranks, device)

    def describe(self, num_shards: int) -> str:
        return "fast"


@dataclass(frozen=True)
class Exact:
    """Sums that depend on neither order nor grouping: plans agree to the bit.

    `method`: `tree` (a fixed binary tree over the shards, fp32), `bin64` (one fp64 accumulator per element at an
    offset), `auto` (tree up to 64 shards, then bin64: by the number of shards alone, since the method changes bits).
    `bucket_mb`: size of the pieces in MiB that are sent while backward still runs; changes no bit.
    """

    name: str = "exact"
    method: str = "auto"
    bucket_mb: float = option(25.0, resume="free")
    exact = True

    def __post_init__(self) -> None:
        choice("reduction.method", self.method, ("auto", "tree", "bin64"))
        positive("reduction.bucket_mb", self.bucket_mb)

    def build(self, working: WorkingCopy, strategy: Single, plan: BatchPlan, ranks: Ranks, device: torch.device) -> Reducer:
        from isobatch.reduction.exact import build

        return build(self, working, strategy, plan, ranks, device)

    def resolved_method(self, num_shards: int) -> str:
        if self.method != "auto":
            return self.method
        return "tree" if num_shards <= 64 else "bin64"

    def describe(self, num_shards: int) -> str:
        return f"exact ({self.resolved_method(num_shards)})"


TABLE: dict[str, Any] = {"fast": Fast, "exact": Exact}
MARKS = Marks(resume="identity", speed=True)
