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
from isobatch.runtime import accelerator, hardware
from isobatch.runtime.distributed import Ranks
from isobatch.runtime.trees import tensors
from isobatch.train.batch_norm import tracking_layers

SHARE = 0.8  # of the main memory that is free: the rest is for data workers, messages and other programs
MARGIN = 0.03  # of an accelerator's memory: workspaces of other kernels than the trial's, and what falls between blocks
COLLECTIVES = 400 * 2**20  # bytes of a communicator's buffers, outside torch's count
FEW = 2, 4  # samples that the estimate before a trial on a CPU is drawn from


@dataclass
class Choice:
    """`batch`: chosen; `tried`: micro batch -> whether it fitted on this rank; `words`: for a person."""

    batch: Batch
    tried: dict[int, bool] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)


def candidates(effective: int, accumulation: int | None, num_replicas: int, shard: int | None = None) -> list[Batch]:
    """The micro batches that matter, largest first: the smallest for each number of micro steps.

    A larger one with as many micro steps would take more memory for nothing. A given accumulation leaves one. Where no
    `shard` is stated, each cuts other shards.
    """
    alone = resolve_batch(effective, None, None, num_replicas, shard or 1)
    steps = range(1, alone.busiest + 1) if accumulation is None else [accumulation]
    found = {batch.micro: batch for n in steps for batch in [resolve_batch(effective, None, n, num_replicas, shard)]}
    return [found[micro] for micro in sorted(found, reverse=True)]


@without_global_hooks()
def choose(config: Config, model: nn.Module, splits: Splits, batches: list[Batch], ranks: Ranks,
           device: torch.device) -> Choice:  # fmt: skip
    """Try `batches` (candidates) on this rank's device and agree on the smallest answer. A collective.

    Raises:
        ConfigError: not even the smallest candidate fits on some rank.
    """
    usable = [batch for batch in batches if _normalisable(config, model, len(splits.train), batch)]
    if not usable:
        return Choice(batches[0])  # every one of them is refused, with the reason, where the policy is applied
    search = MicroSearch(config, model, splits, ranks, device)
    mine = search.first_that_fits(usable)
    index = ranks.agree(mine)
    if index == len(usable):
        other = "" if mine == index else " of another rank"
        raise ConfigError("batch.micro", "auto", f"not even a micro batch of {usable[-1].micro} fits on {device}{other}",
                          "use a smaller model or image, precision=amp or model.grad_checkpointing=true"
                          + (", or leave accumulation=auto" if config.accumulation.steps else ""))  # fmt: skip
    chosen = usable[index]
    return Choice(chosen, search.tried, [search.line(chosen, index > mine), *search.assumed])


def _normalisable(config: Config, model: nn.Module, samples: int, batch: Batch) -> bool:
    """Batch norm never gets a shard of one sample."""
    if config.model.batch_norm != "shard" or not tracking_layers(model):
        return True
    plan = BatchPlan(batch, config.sampler.order_size(samples), config.sampler.tail)
    return plan.smallest_shard() > 1


class MicroSearch:
    """The trials of one rank."""

    def __init__(self, config: Config, model: nn.Module, splits: Splits, ranks: Ranks, device: torch.device):
        self.config, self.model, self.splits, self.ranks, self.device = config, model, splits, ranks, device
        self.tried: dict[int, bool] = {}
        self.assumed: list[str] = []
        self.room: int | None = None
        self.few: list[list[estimate.SavedTensor]] | None = None
        if device.type == "cpu":
            # nothing says no before the machine swaps or kills: a limit has to be assumed
            free = -ranks.agree(-estimate.available_bytes())  # before any rank's trial takes some of it
            self.room = int(SHARE * free / ranks.local_world_size)
            self.assumed = [f"a CPU never reports out of memory in time, so a rank is assumed to have {100 * SHARE:.0f} % "
                            f"of its share of the memory that is free now: {self.room / estimate.MB:,.0f} MB"]  # fmt: skip

    def first_that_fits(self, batches: list[Batch]) -> int:
        """Index of the largest of `batches` (descending) that fits, by bisection; len(batches) if none does."""
        low, high = 0, len(batches)  # the answer is in low .. high
        probe = 0  # mostly the largest fits
        while low < high:
            if self._fits(batches[probe]):
                high = probe
            else:
                low = probe + 1
            probe = (low + high) // 2
        return low

    def _fits(self, batch: Batch) -> bool:
        micro = batch.micro
        if micro not in self.tried:
            try:
                self.tried[micro] = self._try(batch)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.tried[micro] = False
            finally:
                self._tidy()
        return self.tried[micro]

    def _try(self, batch: Batch) -> bool:
        lanes = hardware.lanes(self.config, self.ranks, self.device, batch.at_once)
        resident = estimate.resident(self.config, self.model, batch, lanes)
        trial = Trial(self.config, self.model, self.splits, self.device, resident.beside)
        trial.ballast += self._held_by_a_training(trial, batch)
        if self.room is not None and self._estimate(trial, batch, resident) > self.room:
            return False
        return trial.fits(batch.micro, min(2, batch.accumulation_steps))

    def _held_by_a_training(self, trial: Trial, batch: Batch) -> int:
        """Bytes on an accelerator that a trial has not: data that lives there, the batch that is copied ahead (bin64: all of a
        window), what collectives and kernels take for themselves."""
        if self.device.type == "cpu":
            return 0
        workers = getattr(self.config.data, "num_workers", None)
        data = [t for split in (self.splits.train, self.splits.eval) for t in split.tensors or () if not workers]
        samples, reduction = batch.micro, self.config.reduction
        if "bin64" in reduction.describe(batch.num_shards):
            samples = batch.micro * batch.accumulation_steps
        ahead = samples * sum(t.nbytes for t in tensors(trial.one))
        module = torch.get_device_module(self.device)
        total = module.mem_get_info(self.device)[1] if hasattr(module, "mem_get_info") else 0
        return sum(t.nbytes for t in data) + ahead + int(MARGIN * total) + (COLLECTIVES if self.ranks.world_size > 1 else 0)

    def _tidy(self) -> None:
        """Let go of the trial's copy: modules sit in cycles, and the next trial needs the room."""
        gc.collect()
        accelerator.empty_cache(self.device)

    def _estimate(self, trial: Trial, batch: Batch, resident: estimate.Resident) -> int:
        """Bytes beside the weights, which are in memory already."""
        micro = batch.micro
        if micro <= FEW[1]:
            saved = trial.saved(micro)
        else:
            if self.few is None:
                self.few = [trial.saved(n) for n in FEW]
            small, twice = self.few
            saved = extrapolated(small, twice, micro)
        all_gradients = batch.accumulation_steps > 1 or batch.num_replicas > 1
        return resident.working + resident.beside + estimate.peak(saved, resident.gradients, all_gradients)

    def line(self, chosen: Batch, lowered: bool) -> str:
        """What was found, for a person."""
        failed = sorted((m for m, fitted in self.tried.items() if not fitted), reverse=True)
        text = f"batch.micro=auto: {chosen.micro} fits on {self.device}"
        if failed:
            text += f", {', '.join(map(str, failed))} did not"
        if lowered:
            text += "; another rank has room for no more"
        # with a stated shard any other answer would have been the same training
        return text if chosen.stated else f"{text}; set batch.micro={chosen.micro} to have the same shards anywhere"


def extrapolated(
    small: list[estimate.SavedTensor], twice: list[estimate.SavedTensor], micro: int
) -> list[estimate.SavedTensor]:
    """What `micro` samples would save, given what FEW save."""
    if len(small) != len(twice):
        return [s._replace(nbytes=s.nbytes * micro // FEW[1]) for s in twice]
    # a straight line for each tensor: not all of them grow (autocast keeps half weights)
    steps = (micro - FEW[0]) / (FEW[1] - FEW[0])
    return [estimate.SavedTensor(max(0, round(a.nbytes + steps * (b.nbytes - a.nbytes))), a.gradient, a.scratch)
            for a, b in zip(small, twice, strict=True)]  # fmt: skip
