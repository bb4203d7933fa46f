"""One run, from its config to its files: the parts are built here, in order, once."""

from __future__ import annotations

import dataclasses
import gc
import time
from pathlib import Path
from typing import Any

import torch

from isobatch import better, tasks
from isobatch import config as configuration
from isobatch.amounts import lengths_in_updates
from isobatch.audit import hooks
from isobatch.batch_plan import BatchPlan, resolve_batch
from isobatch.config import Config
from isobatch.console import Console, make_console
from isobatch.data import Split, Splits
from isobatch.data.device import SideStream
from isobatch.data.feed import Feed, Source, example, make_source
from isobatch.errors import ConfigError, Stopped
from isobatch.evaluate.evaluator import Evaluator, chosen_split
from isobatch.launch.outcome import give_up
from isobatch.launch.signals import STOP
from isobatch.launch.withdrawal import withdraw
from isobatch.logger import Logger, RunInfo
from isobatch.model import freezing
from isobatch.planner import micro
from isobatch.planner import notes as plan_notes
from isobatch.planner.preview import Preview, preview, world
from isobatch.planner.sharing import Sharing, decide
from isobatch.planner.trial import in_words
from isobatch.reduction import elements
from isobatch.resume import saved_model
from isobatch.resume.signature import Signature
from isobatch.resume.start import Resume
from isobatch.run_folder import layout
from isobatch.run_folder.files import RunFiles
from isobatch.run_folder.fingerprint import Fingerprint
from isobatch.run_folder.summary import summarize
from isobatch.runtime import accelerator, hardware
from isobatch.runtime.distributed import Ranks, choose_device
from isobatch.runtime.randomness import ShardSeeder, draws_on_host, seed_everything
from isobatch.shards.criteria import EachShard, handed_on
from isobatch.shards.side_by_side import SideBySide
from isobatch.tasks import Work
from isobatch.train import batch_norm, graph, pace, sharpness
from isobatch.train.governed import governed
from isobatch.train.loop import Loop
from isobatch.train.rehearsal import SAMPLES, rehearse
from isobatch.train.showing import Showing
from isobatch.train.state import TrainState
from isobatch.train.step import Parts, mean


def run_job(plain: dict[str, Any], run_dir: Path, ranks: Ranks) -> float | None:
    """Do what `task` says, in this process, as one of `ranks`. Returns the last evaluation's objective (see better.objective).

    However it ends, the run folder says so.

    Raises:
        ConfigError: refused. Stopped: by a signal, after a checkpoint. JobFailed and others: failed.
    """
    config = configuration.load(plain)
    task = tasks.of(config)
    if task.without_run(config, run_dir, ranks):
        return None
    run = Run(task.settled(config, ranks), run_dir, ranks)
    try:
        run.build()
        run.forget_peaks()
        gc.enable()  # off since the start of the program: see cli.main
        run.perform()
    except BaseException as cause:
        error = in_words(cause, ranks.rank)
        run.finish("stopped" if isinstance(error, Stopped) else "failed", error)
        if error is cause:
            raise
        raise error from None
    run.finish(run.ending, None)
    return better.objective(run.loop.last_eval if run.loop else {}, config.sweep.objective)


class Run:
    """The parts of one run."""

    def __init__(self, config: Config, run_dir: Path, ranks: Ranks):
        self.started = time.time()
        self.config, self.run_dir, self.ranks, self.task = config, run_dir, ranks, tasks.of(config)
        self.world = world(config, ranks)  # what the plan counts: for task=plan it need not be there
        self.files = RunFiles(run_dir, ranks.is_main)
        self.logger, self.console = Logger(), Console()
        self.loop: Loop | None = None
        self.plan: dict[str, Any] = {}
        self.sources: list[Source] = []
        self.fingerprint: Fingerprint | None = None

    def build(self) -> None:
        """Everything up to the first step; refusals come before the first weight is moved."""
        config, ranks = self.config, self.ranks
        config.parallel.check(self.world)
        self.device = device = choose_device(ranks, config.device)
        self.resume = Resume(config, self.run_dir, ranks)  # refuses before the folder's config is replaced
        precision = self.resume.precision(device).settled(config.parallel.lane_devices(device), ranks)
        self.config = config = dataclasses.replace(config, precision=precision, data=self.resume.data())
        self.files.config(configuration.to_yaml(config.plain))
        if ranks.is_main and self.task.logs:
            self.logger = config.logger.build(RunInfo(self.run_dir, config.plain, trains=self.task.trains))
        threads = hardware.set_up(config, ranks, device)
        splits: Splits = config.data.load(config.augment.sample_transform(config.data), config.seed)
        self.data_info = splits.info
        seed_everything(config.seed)  # the weights are drawn next, from the seed alone
        model = self.resume.model(splits.info).build(splits.info)
        freezing.freeze(model, getattr(config.model, "freeze", ()))
        chosen = self.choose_batch(model, splits)
        batch = chosen.batch
        self.config = config = config.debug.on(config, batch.effective)
        order_size = config.sampler.order_size(len(splits.train))
        plan = self.resume.placed(BatchPlan(batch, order_size, config.sampler.tail))
        if self.resume.saved is not None or not self.resume.uses_weights:  # else nothing is normalised by shards
            batch_norm.apply_policy(model, config.model.batch_norm, plan, ranks, device)
        if looks_ahead := self.task.trains or self.task.built == "plan":
            graph.check(config, batch.accumulation_steps, device)
        total = config.steps or plan.ahead + config.epochs * plan.windows_per_epoch  # type: ignore[operator]
        self.config = config = lengths_in_updates(config, total, plan.windows_per_epoch)
        self.plan = {**plan.as_dict(), "world_size": self.world.world_size}
        sharing = decide(config, model, splits, plan, self.world, device) if looks_ahead else Sharing(1)
        held = dataclasses.replace(batch, at_once=sharing.at_once)
        ahead = preview(config, model, splits, held, device) if ranks.is_main else Preview()
        self.files.plan({
            "format": layout.FORMAT, **self.plan,
            "steps_per_epoch": plan.windows_per_epoch, "steps": total, "samples_per_epoch": plan.epoch_size,
            "tail_size": plan.tail_size, "device": accelerator.name(device),
            **splits.fingerprint(config.data, ranks.is_main), "parallel": config.parallel.describe(self.world, device),
            "precision": config.precision.describe(device), "batch_norm": batch_norm.describe(model, config.model.batch_norm),
            "identity": (identity := hardware.identity(config, device, threads, batch)),
            **({"micro_tried": chosen.tried} if chosen.tried else {}), **ahead.record,
        })  # fmt: skip
        facts = {**self.plan, "steps": total, "samples_per_epoch": order_size, "train_samples": len(splits.train),
                 "eval_samples": len(splits.eval), "since": list(plan.since), **Signature.of(splits.info).facts()}  # fmt: skip
        self.about = {"config": config.plain, "plan": facts, "identity": identity}  # what a checkpoint says of its run
        together = batch_norm.decided_by(model, config.model.batch_norm)
        resumed = self.resume.check(facts, identity, config.reduction.exact, together, plan)
        self.console = make_console(ranks.is_main, total, plan.windows_per_epoch, plan.ahead)
        notes = [*splits.info.notes, *resumed, *chosen.words, *([sharing.note] if sharing.note else [])]
        if self.task.trains:
            notes += filter(None, (config.ema.note(total), config.audit.note(total)))
        notes += [*plan_notes.notes(config, model, plan, ranks, device), *ahead.notes]
        view = {"data": plan_notes.data(splits), **plan_notes.view(config, plan, total, self.world, device), **ahead.view}
        self.console.plan(view, notes)
        ahead.show(self.console)
        if self.task.built == "plan":
            return
        self.assemble(model, splits, plan, total, sharing)

    def choose_batch(self, model: torch.nn.Module, splits: Splits) -> micro.Choice:
        """The batch's integers; batch.micro=auto is settled here, by trying (ranks agree)."""
        effective, size, accumulation, shard = self.resume.batch()
        replicas = self.config.parallel.num_replicas(self.world, self.device)
        if size != "auto":
            return micro.Choice(resolve_batch(effective, size, accumulation, replicas, shard))
        assert effective is not None  # the config refuses auto without it
        batches = micro.candidates(effective, accumulation, replicas, shard)
        return micro.choose(self.config, model, splits, batches, self.ranks, self.device)

    def assemble(self, model: torch.nn.Module, splits: Splits, plan: BatchPlan, total: int, sharing: Sharing) -> None:
        config, ranks, device = self.config, self.ranks, self.device
        if config.model.batch_norm == "sync":
            model = batch_norm.synchronised(model)
        channels_last = hardware.wants_channels_last(config, device)
        model = model.to(device, memory_format=torch.channels_last if channels_last else torch.preserve_format)  # type: ignore[call-overload]
        working = config.parallel.working_copy(config.precision, model, ranks.world_size)  # may change its dtype
        average = config.ema.build(model)
        prepare = config.loss.prepare(
            config.augment.batch_transform(splits.info, config.seed),
            lambda chosen: saved_model.build(chosen, splits.info, device, channels_last), config.precision, device, config.seed,
        )  # fmt: skip
        given, seen, metrics = rehearse(config, working.module, splits, device, channels_last, prepare, self.task.trains,
                                        STOP.asked, give_up(self.run_dir, ranks.rank))  # fmt: skip
        config.parallel.shard(model, average and average.module, config.precision, ranks, device,
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
        rules = governed(config, model, optimizer, total, plan, metrics, average is not None, self.run_dir, ranks)
        checkpointer = config.checkpoint.build(self.run_dir, ranks, self.about)
        state = TrainState(model, optimizer, config.precision.scaler(device), average, reducer,
                           followers={**rules.followers, "leaders": checkpointer.leaders})  # fmt: skip
        self.resume.restore(state)
        if self.resume.saved is not None:
            working.push_weights()
        self.resume.choose_weights(state)
        if self.task.trains:
            self.files.resume_metrics(state.step)  # this folder's rows from before a restart, as far as they stand
            self.resume.adopt(checkpointer)
        lanes = config.parallel.lane_devices(device)
        criterion = config.loss.build()
        host = draws_on_host(working.module, criterion, getattr(config.loss, "factory", criterion))
        seed = ShardSeeder(config.seed, lanes, host)
        if sharing.at_once > 1 and config.loss.couples(criterion):
            criterion, prepare = EachShard(criterion, config.loss.averages), handed_on(prepare)
        side = SideStream(device)
        evaluated = chosen_split(config.evaluate, splits)

        def source(split: Split, training: bool) -> Source:
            self.sources.append(make_source(split, device, config, channels_last, ranks, training, side))
            return self.sources[-1]

        self.loop = Loop(
            state=state,
            parts=Parts(
                criterion=criterion, reducer=reducer, precision=config.precision, working=working,
                statistics=statistics, seed=seed, device=device,
                apart=self.watched(working.module, SideBySide(config.seed, lanes, sharing.apart, plan.batch.shard)),
                micro_step=micro_step, weigh=getattr(reducer, "weigh", mean),
                clip=rules.clip, skip_nonfinite=config.on_nonfinite == "skip",
            ),
            feed=Feed(
                source(splits.train, True), plan,
                lambda epoch: config.sampler.order(epoch, len(splits.train), config.seed, splits.train.targets),
                config.parallel.local_replicas(ranks, device), len(lanes), config.loss.averages, prepare,
                keep=reducer.replays, interleaved=not channels_last,
            ),
            evaluator=Evaluator(
                evaluated, source(evaluated, False), config.loss.evaluation(), config.precision, ranks, device,
                # with exact the same bits at any micro batch
                config.batch.eval or (plan.batch.shard if config.reduction.exact else self.plan["micro_batch"]),
                splits.info.num_classes, config.loss.averages, plan.batch.shard, views=config.evaluate.views,
                after=config.parallel.evaluated, seed=seed.evaluation, lanes=lanes, metrics=metrics, example=seen,
            ),
            schedule=rules.schedule, stopping=rules.stopping, ending=self.resume.ended(rules.stopping.ending),
            checkpointer=checkpointer, logger=self.logger, console=self.console, files=self.files, ranks=ranks,
            total_steps=total, log_every=config.log_every, log_weights=config.log_weights, warmup=config.warmup,
            eval_every=config.eval_every or plan.windows_per_epoch, ahead=0 if config.eval_every else plan.ahead,
            profiler=config.profile.build(self.run_dir, ranks, device), stop_requested=STOP.asked,
            pace=pace.watched(config, state, ranks, device), chain=rules.chain,
        )  # fmt: skip
        self.loop.audit = hooks.wanted(config, self.loop, lanes, seed.all, withdraw)

    def watched(self, module: torch.nn.Module, apart: SideBySide) -> SideBySide | Fingerprint:
        """`apart`; where equal training is asked for, it also takes the fingerprints to explain a difference."""
        if self.config.sweep.tolerance is None:
            return apart
        self.fingerprint = Fingerprint(module, apart)
        return self.fingerprint

    def forget_peaks(self) -> None:
        """Peak memory is this job's training: not that of a trial of micro batches, nor of the job before in this process."""
        for device in self.config.parallel.lane_devices(self.device):
            accelerator.forget_peak_memory(device)

    def perform(self) -> None:
        """What the task does."""
        if self.loop is None:
            return
        state = self.loop.state
        if self.ranks.is_main:
            self.logger.start(self.plan, state.logger_run_id, state.samples, self.resume.logged)
            state.logger_run_id = self.logger.run_id
        earlier = self.resume.earlier_result() if self.resume.finished else None
        show = Showing(self.loop, self.data_info)
        with self.config.debug.watching(), self.loop.profiler:
            self.task.perform(Work(self.config, self.run_dir, self.loop, self.data_info, self.resume.saved, earlier))
        if self.fingerprint is not None:
            self.fingerprint.write(self.run_dir, self.ranks)
        show()

    @property
    def ending(self) -> str:
        """The state of a run that nothing has gone wrong with."""
        return self.loop.ending.word if self.loop is not None and self.loop.ending is not None else "completed"

    def finish(self, ending: str, error: BaseException | None) -> None:
        """The end of the data workers, summary.json, the result on the terminal, and the end of the logger's run."""
        for source in self.sources:
            source.close()
        if self.loop and not isinstance(error, KeyboardInterrupt):
            self.loop.checkpointer.join()
        summary = summarize(self, ending, error)
        if not self.stands(error):
            self.files.summary(summary)
        self.files.close()
        self.logger.finish(summary, 0 if error is None else getattr(error, "exit_code", 1))
        self.console.result(summary, str(self.run_dir), self.logger.how_to_look)

    def stands(self, error: BaseException | None) -> bool:
        """Whether the folder's summary is that of a complete run, to which nothing was added."""
        resume = getattr(self, "resume", None)
        nothing_done = isinstance(error, ConfigError) or (resume is not None and resume.finished and resume.in_place)
        return nothing_done and self.files.completed()
