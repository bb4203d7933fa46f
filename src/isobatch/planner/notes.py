"""The plan in words, before training: its numbers, and what it cannot keep equal to another plan."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from isobatch.batch_plan import Batch, BatchPlan, counted
from isobatch.config import Config
from isobatch.data import Splits
from isobatch.launch.devices import count_gpus
from isobatch.model import freezing
from isobatch.runtime import cores
from isobatch.runtime.distributed import Ranks
from isobatch.train.batch_norm import tracking_layers

BUSY = 0.25  # of its time that a process waits for a core: more, and no figure of speed is steady
USUAL_SHARD = 32  # samples that batch norm is mostly used with (Wu and He 2018: error grows below 16)


def notes(config: Config, model: nn.Module, plan: BatchPlan, ranks: Ranks, device: torch.device, threads: int = 1,
          lanes: int = 1) -> list[str]:  # fmt: skip
    """One line each, most important first. `threads`: of a kernel; `lanes`: shards that run at the same time."""
    found = of_training(config, model, plan, ranks, device, threads, lanes) + of_machine(config, plan.batch, ranks, device)
    if config.sampler.tail == "pad" and plan.epoch_size > plan.order_size:
        found.append(f"sampler.tail=pad repeats {plan.epoch_size - plan.order_size} sample(s) in every epoch")
    return found


def of_training(config: Config, model: nn.Module, plan: BatchPlan, ranks: Ranks, device: torch.device, threads: int,
                lanes: int) -> list[str]:  # fmt: skip
    """What says nothing to who only evaluates."""
    batch, found = plan.batch, list[str]()
    if frozen := freezing.describe(model):
        found.append(frozen)
    if config.model.batch_norm == "shard" and any(m.training for m in tracking_layers(model)):
        found += norm_notes(batch)
    if config.model.batch_norm != "shard" and not tracking_layers(model):
        found.append(f"model.batch_norm={config.model.batch_norm} says nothing: the model has no running statistics")
    if config.batch.micro not in (None, "auto") and batch.stated and config.batch.micro % batch.shard:
        held = counted(config.batch.micro // batch.shard, "shard")
        found.append(f"batch.micro={config.batch.micro} has room for {held} of {batch.shard} samples: rounded down to "
                     f"{config.batch.micro // batch.shard * batch.shard}")  # fmt: skip
    asked = config.accumulation.steps
    if asked is not None and batch.stated and config.batch.micro is None and batch.accumulation_steps < asked:
        found.append(f"accumulation={asked}: {counted(batch.accumulation_steps, 'micro step')} of "
                     f"{counted(batch.at_once, 'shard')} hold as little at once")  # fmt: skip
    idle = max(0, batch.num_replicas - batch.num_shards)
    if idle:
        key = "batch.shard" if batch.stated else "batch.micro"
        size = batch.effective // batch.num_replicas  # the largest that gives every replica one
        way_out = f"{key}={size} would use them all (another training for what depends on the shard)" if size else "use fewer"
        wait = "has no shard and waits" if idle == 1 else "have no shard and wait"
        found.append(f"{idle} of {batch.num_replicas} replicas {wait}: {way_out}")
    elif batch.num_shards % batch.num_replicas:
        found.append(
            f"{batch.num_shards} shards on {batch.num_replicas} replicas are uneven: some wait for the "
            f"{batch.accumulation_steps} micro steps of the busiest"
        )
    if not config.reduction.exact and batch.num_shards > 1:
        found.append("reduction=fast: plans agree up to rounding; reduction=exact makes them agree to the bit")
    helpers = min(cores.usable(), batch.num_shards)
    alone = device.type == "cpu" and ranks.world_size == 1 and config.parallel.name == "single"
    if config.reduction.exact and alone and helpers > lanes == 1:
        found.append(f"reduction=exact keeps one core busy; parallel=ddp parallel.nproc={helpers} gives the same bits sooner")
    if config.reduction.exact and (config.threads or 0) > lanes and config.threads != threads:
        found.append(f"threads={config.threads}: reduction=exact runs {counted(lanes, 'shard')} at a time here, with "
                     f"{counted(threads, 'thread')} for each")  # fmt: skip
    if device.type == "cuda" and config.reduction.exact and not config.deterministic:
        found.append("reduction=exact takes torch's deterministic kernels; what has none is named before the first step")
    elif device.type == "cuda" and not config.deterministic:
        found.append("some CUDA kernels are not deterministic: deterministic=true asks torch for those that are")
    if config.cuda_graph and device.type == "cuda":
        apart = "; gradients are added over the ranks after the backward, not beside it" if ranks.world_size > 1 else ""
        found.append(f"cuda_graph=true: micro steps are recorded after two windows and replayed{apart}")
    return found


def of_machine(config: Config, batch: Batch, ranks: Ranks, device: torch.device) -> list[str]:
    """What this machine has not, or has too little of."""
    found = list[str]()
    if device.type != "cuda" and (asked := getattr(config.parallel, "devices", None)):
        found.append(f"parallel.devices={asked} names GPUs and this machine has none: "
                     f"{batch.num_replicas} replica(s) on {device}")  # fmt: skip
    if device.type == "cpu" and config.device is None and (reason := unusable_gpus()):
        found.append(reason)
    return found + crowded(config, ranks, device)


def crowded(config: Config, ranks: Ranks, device: torch.device) -> list[str]:
    """Cores that more wants than there are."""
    mine, found = cores.usable(), []
    if device.type == "cpu" and (config.threads or 0) * ranks.local_world_size > mine:
        several = f" on each of {ranks.local_world_size} ranks" if ranks.local_world_size > 1 else ""
        found.append(f"threads={config.threads}{several} are more than the {mine} core(s) of this process: they wait for each "
                     "other; threads=null shares the cores")  # fmt: skip
    if (share := cores.waited() or 0.0) > BUSY:
        found.append(f"the cores are busy: this process has waited for one {100 * share:.0f} % of its time so far; expect "
                     "speeds to vary, and lose less with fewer threads or ranks")  # fmt: skip
    return found


def unusable_gpus() -> str | None:
    """Why a machine that has GPUs trains on its CPU all the same; None: it has none, or none is shown."""
    if not (there := count_gpus()):
        return None
    why = "torch finds none of them"
    if torch.version.cuda is None and torch.version.hip is None:
        why = "this torch is built without CUDA or ROCm: install one that has it"
    else:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.is_available()
        if said:
            why = " ".join(str(said[-1].message).split("(Triggered")[0].split())
    return f"this machine has {there} GPU(s) and the training runs on the CPU: {why} (device=cpu says that it is meant)"


def norm_notes(batch: Batch) -> list[str]:
    """What a person has to know who trains batch norm on these shards."""
    key = "batch.shard" if batch.stated else "batch.micro"
    found = []
    if batch.num_shards > 1:
        found.append(f"batch norm normalises over a shard of {batch.largest} samples: {key}={batch.shard} is part of the "
                     "contract for this model, and another one is another training")  # fmt: skip
    if batch.largest < USUAL_SHARD // 2 and batch.num_shards > 1:
        found.append(f"the statistics of {batch.largest} samples are noisy: batch.shard={min(USUAL_SHARD, batch.effective)} is "
                     "usual for batch norm")  # fmt: skip
    return found


def view(config: Config, plan: BatchPlan, total: int, ranks: Ranks, device: torch.device, lanes: int = 1) -> dict[str, str]:
    """The plan as a person reads it: label -> text. `total`: updates of the run. `lanes`: shards that run at the same time."""
    batch = plan.batch
    tail = "" if plan.tail_size == batch.effective else f", the last of {plan.tail_size} samples"
    return {
        "batch": str(batch),
        "parallel": config.parallel.describe(ranks, device),
        "precision": config.precision.describe(device),
        "reduction": config.reduction.describe(batch.num_shards) + (f", {lanes} shards at a time" if lanes > 1 else ""),
        "epoch": f"{plan.epoch_size} samples in {plan.windows_per_epoch} updates{tail}",
        "length": f"{total} updates" + (f" in {config.epochs} epochs" if config.epochs else ""),
    }


def data(splits: Splits) -> str:
    """How much there is of what."""
    classes = splits.info.num_classes
    return (f"{splits.info.name}: {len(splits.train)} training and {len(splits.eval)} evaluation samples"
            + (f" of {classes} class{'es' if classes > 1 else ''}" if classes else ""))  # fmt: skip
