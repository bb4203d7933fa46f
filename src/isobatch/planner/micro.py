"""`batch.micro=auto`: the largest micro batch that fits, found by trying. The effective batch stays what it is."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field

import torch
from torch import nn

from isobatch.batch_plan import Batch, BatchPlan, resolve_batch
from isobatch.config import Config
from isobatch.data import Splits
from isobatch.errors import ConfigError
from isobatch.planner import estimate
from isobatch.planner.hooks import without_global_hooks
from isobatch.planner.trial import Trial, is_out_of_memory
from isobatch.runtime import accelerator
from isobatch.runtime.distributed import Ranks
from isobatch.train.batch_norm import tracking_layers

SHARE = 0.8  # of the main memory that is free: the rest is for data workers, messages and other programs
MARGIN = 0.03  # of an accelerator's memory: workspaces of other kernels than the trial's, and what falls between blocks
COLLECTIVES = 400 * 2**20  # bytes of a communicator's buffers, outside torch's count
FEW = 2, 4  # samples that the estimate before a trial on a CPU is drawn from


@dataclass
class Choice:
    """`micro`: chosen; `tried`: micro batch -> whether it fitted on this rank; `words`: for a person."""

    micro: int
    tried: dict[int, bool] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)


def candidates(effective: int, accumulation: int | None, num_replicas: int) -> list[int]:
    """The micro batches that matter, largest first: the smallest for each number of micro steps.

    A larger one with as many micro steps would take more memory for nothing. A given accumulation leaves one.
    """
    if accumulation is not None:
        return [resolve_batch(effective, None, accumulation, num_replicas).micro]
    most = -(-effective // num_replicas)  # micro steps at a micro batch of 1
    return sorted({-(-effective // (num_replicas * steps)) for steps in range(1, most + 1)}, reverse=True)


@without_global_hooks()
def choose(config: Config, model: nn.Module, splits: Splits, effective: int, accumulation: int | None,
           num_replicas: int, ranks: Ranks, device: torch.device) -> Choice:  # fmt: skip
    """Try on this rank's device and agree on the smallest answer. A collective.

    Raises:
        ConfigError: not even the smallest candidate fits on some rank.
    """
    sizes = candidates(effective, accumulation, num_replicas)
    usable = [m for m in sizes if _normalisable(config, model, len(splits.train), Batch(effective, m, num_replicas))]
    if not usable:
        return Choice(sizes[0])  # every one of them is refused, with the reason, where the policy is applied
    search = Search(config, model, splits, effective, num_replicas, ranks, device)
    mine = search.first_that_fits(usable)
    index = ranks.agree(mine)
    if index == len(usable):
        other = "" if mine == index else " of another rank"
        raise ConfigError("batch.micro", "auto", f"not even a micro batch of {usable[-1]} fits on {device}{other}",
                          "use a smaller model or image, precision=amp or model.grad_checkpointing=true"
                          + (", or leave accumulation=auto" if accumulation else ""))  # fmt: skip
    chosen = usable[index]
    return Choice(chosen, search.tried, [search.words(chosen, index > mine), *search.assumed])


def _normalisable(config: Config, model: nn.Module, samples: int, batch: Batch) -> bool:
    """Batch norm never gets a shard of one sample."""
    if config.model.batch_norm != "shard" or not tracking_layers(model):
        return True
    plan = BatchPlan(batch, config.sampler.order_size(samples), config.sampler.tail)
    return plan.smallest_shard() > 1


class Search:
    """The trials of one rank."""

    def __init__(self, config: Config, model: nn.Module, splits: Splits, effective: int, num_replicas: int,
                 ranks: Ranks, device: torch.device):  # fmt: skip
        self.effective, self.num_replicas, self.device = effective, num_replicas, device
        self.config, self.model, self.splits, self.ranks = config, model, splits, ranks
        self.tried: dict[int, bool] = {}
        self.assumed: list[str] = []
        self.room: int | None = None
        self.few: list[list[estimate.Saved]] | None = None
        if device.type == "cpu":
            # nothing says no before the machine swaps or kills: a limit has to be assumed
            free = -ranks.agree(-estimate.available_bytes())  # before any rank's trial takes some of it
            self.room = int(SHARE * free / ranks.local_world_size)
            self.assumed = [f"a CPU never reports out of memory in time, so a rank is assumed to have {100 * SHARE:.0f} % "
                            f"of its share of the memory that is free now: {self.room / estimate.MB:,.0f} MB"]  # fmt: skip

    def first_that_fits(self, sizes: list[int]) -> int:
        """Index of the largest of `sizes` (descending) that fits, by bisection; len(sizes) if none does."""
        low, high = 0, len(sizes)  # the answer is in low .. high
        probe = 0  # mostly the largest fits
        while low < high:
            if self._fits(sizes[probe]):
                high = probe
            else:
                low = probe + 1
            probe = (low + high) // 2
        return low

    def _fits(self, micro: int) -> bool:
        if micro not in self.tried:
            try:
                self.tried[micro] = self._try(micro)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.tried[micro] = False
            finally:
                self._tidy()
        return self.tried[micro]

    def _try(self, micro: int) -> bool:
        batch = Batch(self.effective, micro, self.num_replicas)
        resident = estimate.resident(self.config, self.model, batch)
        trial = Trial(self.config, self.model, self.splits, self.device, resident.beside)
        trial.ballast += self._held_by_a_training(trial, batch)
        if self.room is not None and self._estimate(trial, micro, batch, resident) > self.room:
            return False
        return trial.fits(micro, min(2, batch.accumulation_steps))

    def _held_by_a_training(self, trial: Trial, batch: Batch) -> int:
        """Bytes on an accelerator that a trial has not: data that lives there, the batch that is copied ahead (bin64: all of a
        window), what collectives and kernels take for themselves."""
        if self.device.type == "cpu":
            return 0
        workers = getattr(self.config.data, "num_workers", None)
        data = [t for split in (self.splits.train, self.splits.eval) for t in split.tensors or () if not workers]
        samples, reduction = batch.micro, self.config.reduction
        if reduction.exact and reduction.resolved_method(batch.num_shards) == "bin64":
            samples = batch.micro * batch.accumulation_steps
        ahead = samples * sum(t.nbytes for t in trial.one)
        module = torch.get_device_module(self.device)
        total = module.mem_get_info(self.device)[1] if hasattr(module, "mem_get_info") else 0
        return sum(t.nbytes for t in data) + ahead + int(MARGIN * total) + (COLLECTIVES if self.ranks.world_size > 1 else 0)

    def _tidy(self) -> None:
        """Let go of the trial's copy: modules sit in cycles, and the next trial needs the room."""
        gc.collect()
        accelerator.empty_cache(self.device)

    def _estimate(self, trial: Trial, micro: int, batch: Batch, resident: estimate.Resident) -> int:
        """Bytes beside the weights, which are in memory already."""
        if micro <= FEW[1]:
            saved = trial.saved(micro)
        else:
            if self.few is None:
                self.few = [trial.saved(n) for n in FEW]
            small, twice = self.few
            saved = extrapolated(small, twice, micro)
        all_gradients = batch.accumulation_steps > 1 or batch.num_replicas > 1
        return resident.working + resident.beside + estimate.peak(saved, resident.gradients, all_gradients)

    def words(self, chosen: int, lowered: bool) -> str:
        """What was found, for a person."""
        failed = sorted((m for m, fitted in self.tried.items() if not fitted), reverse=True)
        text = f"batch.micro=auto: {chosen} fits on {self.device}"
        if failed:
            text += f", {', '.join(map(str, failed))} did not"
        if lowered:
            text += "; another rank has room for no more"
        return f"{text}; set batch.micro={chosen} to have the same shards anywhere"


def extrapolated(small: list[estimate.Saved], twice: list[estimate.Saved], micro: int) -> list[estimate.Saved]:
    """What `micro` samples would save, given what FEW save."""
    if len(small) != len(twice):
        return [s._replace(nbytes=s.nbytes * micro // FEW[1]) for s in twice]
    # a straight line for each tensor: not all of them grow (autocast keeps half weights)
    steps = (micro - FEW[0]) / (FEW[1] - FEW[0])
    return [estimate.Saved(max(0, round(a.nbytes + steps * (b.nbytes - a.nbytes))), a.gradient, a.scratch)
            for a, b in zip(small, twice, strict=True)]  # fmt: skip
