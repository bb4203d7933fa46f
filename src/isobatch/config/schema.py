"""The typed tree: the top-level keys, and of each group the class that its table names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isobatch import better
from isobatch.amounts import period
from isobatch.checks import choice, positive, within
from isobatch.errors import ConfigError
from isobatch.marks import option
from isobatch.model import COMPILE

if TYPE_CHECKING:
    from isobatch.accumulation import Accumulation
    from isobatch.audit import NoAudit
    from isobatch.augment.options import NoAugment
    from isobatch.checkpoint import NoCheckpoint
    from isobatch.clip import ClipOptions
    from isobatch.data.base import DataOptions
    from isobatch.debug import NoDebug
    from isobatch.ema.options import EmaOptions
    from isobatch.logger.options import LoggerOptions
    from isobatch.loss.losses import Loss
    from isobatch.metrics import NoMetrics
    from isobatch.model.architectures import Model
    from isobatch.optimizer import OptimizerOptions
    from isobatch.parallel.base import Single
    from isobatch.precision.levels import Full
    from isobatch.profile import NoProfile
    from isobatch.reduction.protocol import Reduction
    from isobatch.sampler import Sampler
    from isobatch.scheduler import Factors
    from isobatch.stop import StopOptions
    from isobatch.writer import WriterOptions


@dataclass(frozen=True)
class BatchOptions:
    effective: int | None = 48
    shard: int | None = 8  # null: the micro batch
    micro: Any = None  # a positive integer, null, or `auto`: the largest that fits
    eval: int | None = None  # of an evaluation; null: as the micro batch

    def __post_init__(self) -> None:
        for key in ("effective", "shard", "eval"):
            if getattr(self, key) is not None:
                positive(f"batch.{key}", getattr(self, key))
        if isinstance(self.micro, bool) or not (self.micro in (None, "auto") or isinstance(self.micro, int)):
            raise ConfigError("batch.micro", self.micro, "is neither a positive integer, null nor auto",
                              "set batch.micro=16, batch.micro=null or batch.micro=auto")  # fmt: skip
        if isinstance(self.micro, int):
            positive("batch.micro", self.micro)


@dataclass(frozen=True)
class SweepOptions:
    """What concerns the jobs of a sweep together.

    Args:
        tolerance: every job has to train what the first one does: largest relative distance of weights and losses
            (0: to the bit; null: do not ask). The sweep ends with exit code 1 when one does not.
        skip_unavailable: a job that this machine cannot run (too few devices, a precision it lacks) is listed as skipped
            with the reason, and does not make the sweep fail.
        dry_run: list the jobs with their plans and costs, and run none.
        parallel_jobs: how many at a time on this machine, each with its own GPUs and cores; on SLURM, of the array.
        objective: the metric of the last evaluation that a search optimizes; null = eval/accuracy, without one eval/loss.
        mode: `max` or `min` of it is better; `auto` for the metrics that are known.
    """

    tolerance: float | None = None
    skip_unavailable: bool = False
    dry_run: bool = False
    parallel_jobs: int = 1
    objective: str | None = None
    mode: str = "auto"

    def __post_init__(self) -> None:
        if self.tolerance is not None:
            within("sweep.tolerance", self.tolerance, 0, 1e6)
        positive("sweep.parallel_jobs", self.parallel_jobs)
        better.check("sweep", self.objective or "auto", self.mode)


@dataclass(frozen=True)
class CostOptions:
    """The network between replicas, for `task=plan`.

    Args:
        bandwidth_gb_s: GB/s (10^9 bytes) that a replica sends while it receives as much; null: no cost model.
        latency_us: microseconds of one message from a replica to the next.
    """

    bandwidth_gb_s: float | None = None
    latency_us: float = 20.0

    def __post_init__(self) -> None:
        if self.bandwidth_gb_s is not None:
            positive("cost.bandwidth_gb_s", self.bandwidth_gb_s)
        within("cost.latency_us", self.latency_us, 0, 1e9)


@dataclass(frozen=True)
class ReplayOptions:
    """Which steps `task=replay` trains again.

    Args:
        start: `replay.from`: the step of a checkpoint, 0 = from the seed; null = the earliest checkpoint.
        steps: how many; null = all that the run has recorded.
    """

    start: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if self.start is not None:
            within("replay.from", self.start, 0, 1e15)
        if self.steps is not None:
            positive("replay.steps", self.steps)


@dataclass(frozen=True)
class PredictOptions:
    """What `task=predict` answers.

    Args:
        path: a folder of images (also deeper below it), an image, a csv with a column of paths relative to its own folder,
            a tar or `photos-*.tar`; null = the data set's evaluation samples, without their labels.
        column: of the csv. top: classes per sample, the most probable first.
    """

    path: str | None = None
    column: str = "path"
    top: int = 5

    def __post_init__(self) -> None:
        positive("predict.top", self.top)


@dataclass(frozen=True)
class EvaluateOptions:
    """How every evaluation, also the ones of a training, looks at its samples.

    Args:
        split: `eval`, or `test`: the third split of the data set, for task=evaluate alone.
        views: of each image, whose outputs are averaged: `one`; `flip`: itself and its mirror image; `five`: its corners and
            center, each as large as in training; `ten`: these and their mirror images. Of predictions too.
    """

    split: str = "eval"
    views: str = "one"

    def __post_init__(self) -> None:
        choice("evaluate.split", self.split, ("eval", "test"))
        choice("evaluate.views", self.views, ("one", "flip", "five", "ten"))


@dataclass(frozen=True)
class LrRangeOptions:
    """What `task=lr_range` goes through.

    Args:
        start, end: the learning rate of the first and of the last step; it grows by the same factor at each.
        steps: how many. diverged: it ends where the loss has risen by so many times of what it was or had fallen by.
    """

    start: float = 1e-6
    end: float = 10.0
    steps: int = 100
    diverged: float = 1.0

    def __post_init__(self) -> None:
        positive("lr_range.start", self.start)
        positive("lr_range.steps", self.steps)
        within("lr_range.diverged", self.diverged, 0, 1e9)
        if not self.start < self.end < 1e9:
            raise ConfigError("lr_range.end", self.end, f"is not above lr_range.start={self.start:g}", "set lr_range.end=10")


# top-level keys that hold settings of their own
NESTED: dict[str, type] = {"batch": BatchOptions, "sweep": SweepOptions, "cost": CostOptions, "replay": ReplayOptions,
                           "predict": PredictOptions, "evaluate": EvaluateOptions, "lr_range": LrRangeOptions}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The top-level keys that are no group."""

    task: str = option("train", resume="free")
    seed: int = option(0, resume="contract")
    epochs: int | None = option(15, resume="free")
    steps: int | None = option(None, resume="free")
    # as NESTED says: built on their own, since OmegaConf cannot fill a frozen dataclass inside another one
    batch: Any = option(None, resume="free", speed=True)  # a resume compares its numbers
    sweep: Any = option(None, resume="free")
    cost: Any = option(None, resume="free")
    replay: Any = option(None, resume="free")
    predict: Any = option(None, resume="free", path=("path",))
    evaluate: Any = option(None, resume="free")
    lr_range: Any = option(None, resume="free")
    max_grad_norm: float | None = option(None, resume="contract")
    log_every: int = option(10, resume="free")
    eval_every: Any = option(None, resume="free")
    log_weights: int = option(0, resume="free")
    warmup: int = option(0, resume="free")
    resume: str | None = option(None, resume="free", path="file")
    allow_contract_change: bool = option(False, resume="free")
    imports: list[str] = option(factory=list, resume="free")
    deterministic: bool = option(False, resume="identity")
    threads: int | None = option(None, resume="identity", speed=True)
    device: str | None = option(None, resume="identity")
    compile: Any = option(False, resume="identity", speed=True)
    cuda_graph: bool | None = option(None, resume="identity", speed=True)
    channels_last: bool | None = option(None, resume="identity")
    on_nonfinite: str = option("stop", resume="free")

    def __post_init__(self) -> None:
        within("warmup", self.warmup, 0, 1e9)
        within("log_weights", self.log_weights, 0, 1e9)
        choice("device", self.device, (None, "cpu", "cuda", "mps", "xpu"))
        choice("compile", self.compile, COMPILE)
        choice("on_nonfinite", self.on_nonfinite, ("stop", "skip"))
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", self.seed, "is not in 0 .. 2^63-1", "set seed=0")
        if (self.epochs is None) == (self.steps is None):
            shown = "null" if self.epochs is None else self.epochs
            raise ConfigError("steps", self.steps, f"exactly one of steps and epochs={shown} has to be null",
                              f"set only steps={self.steps or 1000}, or only epochs={self.epochs or 15}")  # fmt: skip
        for key in ("epochs", "steps", "log_every", "threads", "max_grad_norm"):
            if getattr(self, key) is not None:
                positive(key, getattr(self, key))
        if self.eval_every is not None:
            object.__setattr__(self, "eval_every", period("eval_every", self.eval_every))
        if self.threads is not None and self.threads > 4096:
            raise ConfigError("threads", self.threads, "is more than any machine has", "set threads=null")


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """The whole tree. `plain` is the resolved data it was built from: what config.yaml, checkpoints and W&B get."""

    batch: BatchOptions
    sweep: SweepOptions
    cost: CostOptions
    replay: ReplayOptions
    predict: PredictOptions
    evaluate: EvaluateOptions
    lr_range: LrRangeOptions
    parallel: Single
    precision: Full
    sampler: Sampler
    accumulation: Accumulation
    reduction: Reduction
    data: DataOptions
    augment: NoAugment
    model: Model
    loss: Loss
    optimizer: OptimizerOptions
    scheduler: Factors
    ema: EmaOptions
    clip: ClipOptions
    stop: StopOptions
    metrics: NoMetrics
    checkpoint: NoCheckpoint
    audit: NoAudit
    logger: LoggerOptions
    writer: WriterOptions
    debug: NoDebug
    profile: NoProfile
    plain: dict[str, Any] = field(default_factory=dict)
