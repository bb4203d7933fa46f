"""Whether several shards share a forward: what the settings say, and a trial of the model before it trains."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from isobatch.batch_plan import BatchPlan, counted
from isobatch.config import Config
from isobatch.data import Splits
from isobatch.errors import kind_and_reason
from isobatch.planner.hooks import without_global_hooks
from isobatch.planner.trial import Trial, is_out_of_memory
from isobatch.runtime import hardware
from isobatch.runtime.distributed import Ranks
from isobatch.runtime.randomness import TORCH_ALONE, code_of, draws_on_host
from isobatch.shards.layout import Layout
from isobatch.shards.trial import Findings, examine, known

DIFFERENT = 8  # samples that the batches of the trial are made of


class Sharing(NamedTuple):
    """`at_once`: shards of one forward. `apart`: the model draws or normalises over samples. `note`: why they are fewer than
    the batch has room for, for a person; None: they are not. `lanes`: forwards that run at the same time."""

    at_once: int
    apart: bool = False
    note: str | None = None
    lanes: int = 1


@without_global_hooks()
def decide(config: Config, model: nn.Module, splits: Splits, plan: BatchPlan, ranks: Ranks, device: torch.device,
           threads: int = 1) -> Sharing:  # fmt: skip
    """A collective: the main rank tries, on a copy of the model, and all do what it found. `threads`: of a kernel."""
    batch = plan.batch
    if batch.at_once == 1:
        return Sharing(1)
    if config.reduction.exact:
        if (why := without_lanes(config, model, device, threads)) is None:
            lanes = hardware.lanes(config, ranks, device, batch.at_once)
            held = counted(lanes, "shard")
            why = (f"as threads={config.threads} says" if config.threads else "one for each core of this process"
                   if device.type == "cpu" else "a stream each")  # fmt: skip
            note = f"{held} at a time, of {batch.at_once} that a micro batch has room for, {why}; memory is that of {held}"
            return Sharing(1, note=note if lanes < batch.at_once else None, lanes=lanes)
        reason: str | None = f"reduction=exact needs every kernel to see a shard alone, and {why}"
    else:
        found = known(model) or ranks.broadcast_object(_tried(config, model, splits, plan, device) if ranks.is_main else None)
        reason = f"the model {found.coupling}" if found.coupling else unwatched(config, device) if found.apart else None
        if reason is None:
            return Sharing(batch.at_once, found.apart)
    return Sharing(1, note=f"one shard a forward, whatever batch.micro says: {reason}; memory and speed are those of "
                   f"{batch.shard} samples at once, and a larger batch.shard is faster (another training for what depends on "
                   "it)")  # fmt: skip


def unwatched(config: Config, device: torch.device) -> str | None:
    """The setting under which nothing can keep apart what a model draws or normalises; None: there is none."""
    if config.compile:
        return f"compile={str(config.compile).lower()} runs past what keeps shards apart"
    if config.cuda_graph and device.type == "cuda":
        return "cuda_graph=true records draws that are not told apart"
    if config.model.batch_norm == "sync":
        return "model.batch_norm=sync normalises over the shards of a micro step on all ranks"
    return None


def without_lanes(config: Config, model: nn.Module, device: torch.device, threads: int) -> str | None:
    """Why the shards of an exact sum cannot run at the same time (train/lanes.py); None: they can, as far as is known."""
    if device.type not in ("cpu", "cuda"):
        return "only a CPU and CUDA devices run several at the same time"
    if threads > 1:
        return f"this run began with {threads} threads for each kernel, which decide its bits"
    if config.compile:
        return f"compile={str(config.compile).lower()} is for one at a time"
    if config.profile.alone:
        return f"profile={config.profile.name} looks at one at a time"
    if config.sweep.tolerance is not None:
        return "sweep.tolerance compares what every module gives, one shard at a time"
    if config.threads is None and owns_code(config, model):
        return ("the model or the loss is code of your own, which may keep something from shard to shard: if it keeps nothing, "
                "threads=2 runs two at a time")  # fmt: skip
    return hooked(model)


def owns_code(config: Config, model: nn.Module) -> bool:
    """Whether a forward runs code that is neither torch's nor timm's nor ours."""
    loss: Any = config.loss
    return draws_on_host(forward_code(config, model, loss.build()))


def forward_code(config: Config, model: nn.Module, criterion: Any) -> list[Any]:
    """What runs in a forward and its loss (see code_of), the function that makes a loss of one's own with it."""
    return code_of(model, criterion, *filter(None, [getattr(config.loss, "factory", None)]))


def hooked(model: nn.Module) -> str | None:
    """Somebody's own hooks, which may know other objects than those of the thread that calls them."""
    code: list[object] = []
    for module in model.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            code += getattr(module, name).values()
    if any((getattr(one, "__module__", None) or "").partition(".")[0] not in TORCH_ALONE for one in code):
        return "the model has forward hooks of its own"
    if any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters()):
        return "its weights have hooks of their own"
    return None


def _tried(config: Config, model: nn.Module, splits: Splits, plan: BatchPlan, device: torch.device) -> Findings:
    try:
        trial = Trial(config, model, splits, device)
        samples = trial.samples(DIFFERENT)
        with trial.precision():
            return examine(trial.working.module, samples, kinds(plan, not hardware.wants_channels_last(config, device)), device)
    except Exception as error:  # a forward that cannot be done at all is told of by the rehearsal
        why = "memory" if is_out_of_memory(error) else kind_and_reason(error, 100)
        return Findings(f"cannot be tried with several ({why})", True)


def kinds(plan: BatchPlan, interleaved: bool) -> list[Layout]:
    """Two shards of one size, and two that differ, where a window has such."""
    shards = plan.batch.num_shards
    largest = -(-plan.batch.effective // shards)
    uneven = any(size % shards and size > shards for size in (plan.batch.effective, plan.tail_size))
    found = [Layout((largest, largest), interleaved)]
    return [*found, Layout((largest, largest - 1), interleaved)] if uneven and largest > 1 else found
