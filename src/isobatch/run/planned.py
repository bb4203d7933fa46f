"""What a run is going to be: everything that is known, and refused, before the first weight is moved."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isobatch.amounts import lengths_in_updates
from isobatch.batch_plan import BatchPlan, resolve_batch
from isobatch.config import Config
from isobatch.data import Splits
from isobatch.model import freezing, habits
from isobatch.planner import micro
from isobatch.planner import notes as plan_notes
from isobatch.planner.preview import Preview, preview, world
from isobatch.planner.sharing import Sharing, decide
from isobatch.resume.signature import Signature
from isobatch.resume.start import Resume
from isobatch.run_folder import layout
from isobatch.runtime import accelerator, hardware
from isobatch.runtime.distributed import Ranks, choose_device
from isobatch.runtime.randomness import seed_everything
from isobatch.tasks import Task, unheard
from isobatch.train import batch_norm, graph


@dataclass(frozen=True)
class Settled:
    """A run whose config is final, as its folder says it: what a resumed run brings along is in it.

    Args:
        resume: where it starts from, which has refused what cannot go on. device: of this rank.
    """

    config: Config
    resume: Resume
    device: torch.device


@dataclass(frozen=True)
class Planned:
    """A run that is planned: nothing is on a device, and nobody has heard of it yet.

    Args:
        config: with every length in updates.
        model: as built, on the host. plan: windows of every epoch. total: updates.
        sharing: how many shards one forward holds.
        facts: the integers that summary.json, plan.json and the logger get. record: all of plan.json.
        about: what a checkpoint says of its run.
        view, notes, ahead: for a person.
    """

    config: Config
    resume: Resume
    device: torch.device
    splits: Splits
    model: torch.nn.Module
    plan: BatchPlan
    total: int
    sharing: Sharing
    facts: dict[str, Any]
    record: dict[str, Any]
    about: dict[str, Any]
    view: dict[str, str]
    notes: list[str]
    ahead: Preview


def settle(config: Config, run_dir: Path, ranks: Ranks) -> Settled:
    """Device, precision and data as the resumed run, the machine and the config say together; nothing is written.

    Raises:
        ConfigError: they do not go together.
    """
    config.parallel.check(world(config, ranks))
    device = choose_device(ranks, config.device)
    resume = Resume(config, run_dir, ranks)
    precision = resume.precision(device).settled(config.parallel.lane_devices(device), ranks)
    return Settled(dataclasses.replace(config, precision=precision, data=resume.data()), resume, device)


def plan_run(settled: Settled, task: Task, ranks: Ranks) -> Planned:
    """Read the data, build the model on the host, and count. Ranks agree.

    Raises:
        ConfigError: something does not fit.
    """
    config, resume, device = settled.config, settled.resume, settled.device
    counted = world(config, ranks)  # what the plan counts: for task=plan it need not be there
    threads = hardware.set_up(config, ranks, device, resume.threads)
    splits: Splits = config.data.load(config.augment.sample_transform(config.data), config.seed)
    seed_everything(config.seed)  # the weights are drawn next, from the seed alone
    model = resume.model(splits.info).build(splits.info)
    settled_habits = habits.settle(model, config.model.name)
    freezing.freeze(model, getattr(config.model, "freeze", ()))
    chosen = choose_batch(settled, counted, model, splits, ranks)
    batch = chosen.batch
    config = config.debug.on(config, batch.effective)
    order_size = config.sampler.order_size(len(splits.train))
    plan = resume.placed(BatchPlan(batch, order_size, config.sampler.tail))
    if resume.saved is not None or not resume.uses_weights:  # else nothing is normalised by shards
        batch_norm.apply_policy(model, config.model.batch_norm, plan, ranks, device)
    if looks_ahead := task.trains or task.built == "plan":
        graph.check(config, batch.accumulation_steps, device)
    total = config.steps or plan.ahead + config.epochs * plan.windows_per_epoch  # type: ignore[operator]
    config = lengths_in_updates(config, total, plan.windows_per_epoch)
    counts = {**plan.as_dict(), "world_size": counted.world_size}
    sharing = decide(config, model, splits, plan, counted, device, threads) if looks_ahead else Sharing(1)
    held = dataclasses.replace(batch, at_once=sharing.at_once)
    ahead = preview(config, model, splits, held, device, sharing.lanes) if ranks.is_main else Preview()
    identity = hardware.identity(config, device, threads, batch)
    record = {
        "format": layout.FORMAT, **counts,
        "steps_per_epoch": plan.windows_per_epoch, "steps": total, "samples_per_epoch": plan.epoch_size,
        "tail_size": plan.tail_size, "device": accelerator.name(device),
        **splits.fingerprint(config.data, ranks.is_main), "parallel": config.parallel.describe(counted, device),
        "precision": config.precision.describe(device), "batch_norm": batch_norm.describe(model, config.model.batch_norm),
        "identity": identity, **({"micro_tried": chosen.tried} if chosen.tried else {}), **ahead.record,
    }  # fmt: skip
    facts = {**counts, "steps": total, "samples_per_epoch": order_size, "train_samples": len(splits.train),
             "eval_samples": len(splits.eval), "since": list(plan.since), **Signature.of(splits.info).facts()}  # fmt: skip
    together = batch_norm.decided_by(model, config.model.batch_norm)
    resumed = resume.check(facts, identity, config.reduction.exact, together, plan)
    notes = [*unheard(config), *splits.info.notes, *settled_habits, *resumed, *chosen.words]
    notes += filter(None, [sharing.note])
    if task.trains:
        notes += filter(None, (config.ema.note(total), config.audit.note(total)))
        whole, splits = splits.eval, dataclasses.replace(splits, eval=config.debug.evaluated(splits.eval, batch.effective))
        if len(splits.eval) < len(whole):
            notes.append(f"debug={config.debug.name}: the evaluation is of {len(splits.eval):,} of {len(whole):,} samples")
    view = {
        "data": plan_notes.data(splits),
        **plan_notes.view(config, plan, total, counted, device, sharing.lanes),
        **ahead.view,
    }
    if looks_ahead:
        notes += [*plan_notes.notes(config, model, plan, ranks, device, threads, sharing.lanes), *ahead.notes]
    else:  # an evaluation has no windows
        notes += plan_notes.of_machine(config, batch, ranks, device)
        view = {label: view[label] for label in ("data", "parallel", "precision")}
    return Planned(config, resume, device, splits, model, plan, total, sharing, counts, record,
                   {"config": config.plain, "plan": facts, "identity": identity}, view, notes, ahead)  # fmt: skip


def choose_batch(settled: Settled, counted: Ranks, model: torch.nn.Module, splits: Splits, ranks: Ranks) -> micro.Choice:
    """The batch's integers; batch.micro=auto is settled here, by trying (ranks agree)."""
    effective, size, accumulation, shard = settled.resume.batch()
    replicas = settled.config.parallel.num_replicas(counted, settled.device)
    if size != "auto":
        return micro.Choice(resolve_batch(effective, size, accumulation, replicas, shard))
    assert effective is not None  # the config refuses auto without it
    batches = micro.candidates(effective, accumulation, replicas, shard)
    return micro.choose(settled.config, model, splits, batches, ranks, settled.device)
