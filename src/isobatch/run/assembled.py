"""From a plan to a loop that is ready for its next window: every part is built here, once, in an order that matters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from isobatch.amounts import in_steps
from isobatch.audit import hooks
from isobatch.batch_plan import BatchPlan
from isobatch.console import Console
from isobatch.data.device import SideStream
from isobatch.data.feed import Feed, example, make_source
from isobatch.evaluate.evaluator import Evaluator, chosen_split
from isobatch.launch.outcome import give_up
from isobatch.launch.signals import STOP
from isobatch.launch.withdrawal import LaunchNode
from isobatch.logger import Logger
from isobatch.metrics.base import Metric
from isobatch.planner.sharing import forward_code
from isobatch.precision.masters import WorkingCopy
from isobatch.reduction import elements
from isobatch.reduction.protocol import Reducer
from isobatch.resume import teacher
from isobatch.run.planned import Planned
from isobatch.run_folder.files import RunFiles
from isobatch.run_folder.fingerprint import Fingerprint
from isobatch.run_folder.rows import Standing
from isobatch.runtime import hardware, randomness
from isobatch.runtime.device_use import DeviceUse
from isobatch.runtime.distributed import Ranks
from isobatch.runtime.randomness import ShardSeeder
from isobatch.shards.criteria import EachShard, handed_on
from isobatch.shards.side_by_side import SideBySide
from isobatch.train import batch_norm, graph, pace, sharpness
from isobatch.train.crews import crew_of
from isobatch.train.governed import governed
from isobatch.train.lanes import LaneSteps
from isobatch.train.loop import Loop
from isobatch.train.rehearsal import SAMPLES, kept_wider, rehearse
from isobatch.train.state import TrainState
from isobatch.train.step import Parts, mean


def assemble(planned: Planned, run_dir: Path, ranks: Ranks, trains: bool, files: RunFiles, logger: Logger,
             console: Console) -> Loop:  # fmt: skip
    """The loop of a run that trains (`trains`) or looks at what was trained.

    1. the model on its device, in the precision's working copy, and its EMA;
    2. the rehearsal, while the weights are whole: where they are spread, a forward is a collective;
    3. the weights spread over ranks, then the optimizer, which has to hold the parts;
    4. compilation, recording and the reducer, which wraps what runs then;
    5. what follows the training (schedule, stopping, checkpoints), and the state that a resumed run brings;
    6. what reads data, and the loop.

    Raises:
        ConfigError: model, data and loss do not fit each other.
    """
    config, resume, device, splits, plan = planned.config, planned.resume, planned.device, planned.splits, planned.plan
    model, total, sharing = planned.model, planned.total, planned.sharing
    if config.model.batch_norm == "sync":
        model = batch_norm.synchronised(model)
    channels_last = hardware.wants_channels_last(config, device)
    model = model.to(device, memory_format=torch.channels_last if channels_last else torch.preserve_format)  # type: ignore[call-overload]
    working = config.parallel.working_copy(config.precision, model, ranks.world_size)  # may change its dtype
    ema = config.ema.build(model)
    prepare = config.loss.prepare(
        config.augment.batch_transform(splits.info, config.seed),
        lambda chosen: teacher.build(chosen, splits.info, device, channels_last), config.precision, device, config.seed,
    )  # fmt: skip
    given, seen, metrics = rehearse(config, working.module, splits, device, channels_last, prepare, trains,
                                    STOP.asked, give_up(run_dir, ranks.rank), kept_wider(ema, model))  # fmt: skip
    config.parallel.partition(model, ema and ema.module, config.precision, ranks, device,
                          lambda: example(splits.train, config.seed, device, channels_last, prepare))  # fmt: skip
    optimizer = config.optimizer.build(model, plan.batch.effective)
    statistics = batch_norm.ShardStatistics(working.module)
    if config.compile:
        # shapes are few and fixed; a graph for any size would be slower, and depend on which size came first
        working.module.compile(dynamic=False, mode=None if config.compile is True else config.compile)
    plan = dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, at_once=sharing.at_once))
    working, strategy, micro_step = graph.chosen(config, working, optimizer, ranks, device)
    reducer = config.reduction.build(working, strategy, plan, ranks, device)
    reducer = elements.in_front_of(reducer, given, SAMPLES, plan.batch, ranks, device)
    reducer = sharpness.around(config.optimizer, reducer, working, [p for p in model.parameters() if p.requires_grad])
    rules = governed(config, model, optimizer, total, plan, metrics, ema is not None, run_dir, ranks)
    checkpointer = config.checkpoint.build(run_dir, ranks, planned.about)
    state = TrainState(model, optimizer, config.precision.scaler(device), ema, reducer,
                       followers={**rules.followers, "leaders": checkpointer.leaders})  # fmt: skip
    resume.restore(state)
    if resume.saved is not None:
        working.push_weights()
    resume.choose_weights(state)
    if trains:
        # this folder's rows from before a restart, as far as they stand
        files.resume_metrics(Standing(state.step, state.evaluated, state.samples), resume.logged)
        resume.adopt(checkpointer)
    lanes = config.parallel.lane_devices(device)
    per_shard = run_apart(planned, working, reducer, prepare, lanes, trains)
    seed, lane_steps = per_shard.seed, per_shard.lane_steps
    side = SideStream(device)
    loop = Loop(
        state=state,
        parts=Parts(
            criterion=per_shard.criterion, reducer=reducer, precision=config.precision, working=working,
            statistics=statistics, seed=seed, device=device,
            apart=per_shard.apart, micro_step=lane_steps or micro_step, weigh=getattr(reducer, "weigh", mean),
            clip=rules.clip, skip_nonfinite=config.on_nonfinite == "skip",
        ),
        feed=fed(planned, plan, ranks, channels_last, side, len(lanes), per_shard.prepare, reducer.replays),
        evaluator=evaluated_by(planned, ranks, channels_last, side, seed, lanes, metrics, seen),
        schedule=rules.schedule, stopping=rules.stopping, ending=resume.ended(rules.stopping.ending),
        checkpointer=checkpointer, logger=logger, console=console, files=files, ranks=ranks,
        total_steps=total, log_every=config.log_every, log_weights=config.log_weights, warmup=config.warmup,
        eval_every=config.eval_every or plan.windows_per_epoch,
        ahead=0 if in_steps(config.plain.get("eval_every")) else plan.ahead,
        profiler=config.profile.build(run_dir, ranks, device), stop_requested=STOP.asked,
        pace=pace.watched(config, state, ranks, device), chain=rules.chain, use=DeviceUse(lanes),
        lane_steps=lane_steps,
    )  # fmt: skip
    loop.audit = hooks.wanted(config, loop, lanes, seed.all, LaunchNode())
    return loop


class PerShard(NamedTuple):
    """What the shards of a window have for themselves. `lane_steps`: what runs several at a time; None: nothing does."""

    criterion: Any
    prepare: Callable[..., Any] | None
    seed: ShardSeeder
    apart: SideBySide | Fingerprint
    lane_steps: LaneSteps | None


def run_apart(planned: Planned, working: WorkingCopy, reducer: Reducer, prepare: Callable[..., Any] | None,
              lanes: list[torch.device], trains: bool) -> PerShard:  # fmt: skip
    """The loss, the draws and the statistics of each shard, be it in a forward with others or beside them."""
    config, sharing, device = planned.config, planned.sharing, planned.device
    criterion = config.loss.build()
    code = forward_code(config, working.module, criterion)
    seed = ShardSeeder(config.seed, lanes, randomness.draws_on_host(code), randomness.draws(code))
    if sharing.at_once > 1 and config.loss.couples(criterion):
        criterion, prepare = EachShard(criterion, config.loss.averages), handed_on(prepare)
    lane_steps = None
    if sharing.lanes > 1 and trains:
        crew = crew_of(sharing.lanes, device)
        prepare = crew.beside(prepare)
        lane_steps = LaneSteps(crew, config.seed, reducer, seed.host, config.threads is not None)
    apart: SideBySide | Fingerprint = SideBySide(config.seed, lanes, sharing.apart, planned.plan.batch.shard)
    if config.sweep.tolerance is not None:  # equal training is asked for: fingerprints explain a difference
        apart = Fingerprint(working.module, apart)
    return PerShard(criterion, prepare, seed, apart, lane_steps)


def fed(planned: Planned, plan: BatchPlan, ranks: Ranks, channels_last: bool, side: SideStream, lanes: int,
        prepare: Callable[..., Any] | None, replays: bool) -> Feed:  # fmt: skip
    """What reads the training split. `plan`: with the shards of one forward, as they were found to go together."""
    config, device, train = planned.config, planned.device, planned.splits.train
    return Feed(
        make_source(train, device, config, channels_last, ranks, True, side), plan,
        lambda epoch: config.sampler.order(epoch, len(train), config.seed, train.targets),
        config.parallel.local_replicas(ranks, device), lanes, config.loss.averages, prepare,
        keep=replays, interleaved=not channels_last,
    )  # fmt: skip


def evaluated_by(planned: Planned, ranks: Ranks, channels_last: bool, side: SideStream, seed: ShardSeeder,
                 lanes: list[torch.device], metrics: list[Metric], seen: Any) -> Evaluator:  # fmt: skip
    """What evaluates. `seen`: output and targets of a sample (see rehearse)."""
    config, device, batch = planned.config, planned.device, planned.plan.batch
    split = chosen_split(config.evaluate, planned.splits)
    return Evaluator(
        split, make_source(split, device, config, channels_last, ranks, False, side), config.loss.evaluation(),
        config.precision, ranks, device,
        # with exact the same bits at any micro batch
        config.batch.eval or (batch.shard if config.reduction.exact else batch.micro),
        planned.splits.info.num_classes, config.loss.averages, batch.shard, views=config.evaluate.views,
        after=config.parallel.evaluated, seed=seed.evaluation, lanes=lanes, metrics=metrics, example=seen,
    )  # fmt: skip
