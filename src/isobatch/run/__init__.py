"""One run, from its config to its files: settled, planned, shown, assembled, done, and told how it ended."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from isobatch import better, tasks
from isobatch import config as configuration
from isobatch.audit import digest
from isobatch.config import Config
from isobatch.console import Console, make_console
from isobatch.errors import ConfigError, Stopped
from isobatch.logger import Logger, RunInfo
from isobatch.planner.trial import explained
from isobatch.run.assembled import assemble
from isobatch.run.planned import Planned, Settled, plan_run, settle
from isobatch.run_folder.files import RunFiles
from isobatch.run_folder.fingerprint import Fingerprint
from isobatch.run_folder.summary import summarize
from isobatch.runtime import accelerator, garbage, kept_memory
from isobatch.runtime.distributed import Ranks
from isobatch.tasks import Work
from isobatch.train.loop import Loop
from isobatch.train.showing import Showing


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
        garbage.on()
        run.perform()
    except BaseException as cause:
        error = explained(cause, ranks.rank)
        run.finish("stopped" if isinstance(error, Stopped) else "failed", error)
        if error is cause:
            raise
        raise error from None
    run.finish(run.ending, None)
    return better.objective(run.loop.last_eval if run.loop else {}, config.sweep.objective)


class Run:
    """A run on this rank, whose parts come one after the other; what has not come yet is None.

    Attributes:
        settled: its final config. planned: what it will be. loop: ready to train.
    """

    def __init__(self, config: Config, run_dir: Path, ranks: Ranks):
        self.started = time.time()
        self.config, self.run_dir, self.ranks, self.task = config, run_dir, ranks, tasks.of(config)
        self.files = RunFiles(run_dir, ranks.is_main)
        self.logger, self.console = Logger(), Console()
        self.settled: Settled | None = None
        self.planned: Planned | None = None
        self.loop: Loop | None = None

    def build(self) -> None:
        """Everything up to the first step; refusals come before the first weight is moved."""
        self.settled = settle(self.config, self.run_dir, self.ranks)  # refuses before the folder's config is replaced
        config = self.settled.config
        self.files.config(configuration.to_yaml(config.plain))
        if self.ranks.is_main and self.task.logs:
            self.logger = config.logger.build(RunInfo(self.run_dir, config.plain, trains=self.task.trains))
        self.planned = planned = plan_run(self.settled, self.task, self.ranks)
        self.show(planned)
        if self.task.built == "loop":
            self.loop = assemble(planned, self.run_dir, self.ranks, self.task.trains, self.files, self.logger, self.console)
            if self.task.trains and self.device.type == "cpu":
                kept_memory.keep()

    def show(self, planned: Planned) -> None:
        """The plan, for a person and as plan.json."""
        self.files.plan(planned.record)
        plan = planned.plan
        self.console = make_console(self.ranks.is_main, planned.total, plan.windows_per_epoch, plan.ahead)
        self.console.plan(planned.view, planned.notes)
        planned.ahead.show(self.console)

    @property
    def plan(self) -> dict[str, Any]:
        """The integers of the plan, as far as there is one."""
        return self.planned.facts if self.planned is not None else {}

    @property
    def device(self) -> torch.device:
        """Of this rank; the host until it is chosen."""
        return self.settled.device if self.settled is not None else torch.device("cpu")

    def forget_peaks(self) -> None:
        """Peak memory is this job's training: not that of a trial of micro batches, nor of the job before in this process."""
        for device in self.config.parallel.lane_devices(self.device):
            accelerator.forget_peak_memory(device)

    def perform(self) -> None:
        """What the task does."""
        if self.loop is None or self.planned is None:
            return
        loop, resume, info = self.loop, self.planned.resume, self.planned.splits.info
        if self.ranks.is_main:
            self.logger.start(self.plan, loop.state.logger_run_id, loop.state.samples, resume.logged)
            loop.state.logger_run_id = self.logger.run_id
        earlier = resume.earlier_result() if resume.finished else None
        show = Showing(loop, info)
        with self.planned.config.debug.watching(), loop.profiler:
            self.task.perform(Work(self.planned.config, self.run_dir, loop, info, resume.saved, earlier))
        if isinstance(loop.parts.apart, Fingerprint):
            loop.parts.apart.write(self.run_dir, self.ranks)
        show()

    @property
    def ending(self) -> str:
        """The state of a run that nothing has gone wrong with."""
        return self.loop.ending.word if self.loop is not None and self.loop.ending is not None else "completed"

    def finish(self, ending: str, error: BaseException | None) -> None:
        """The end of the data workers, summary.json, the result on the terminal, and the end of the logger's run."""
        if self.loop is not None:
            for source in (self.loop.feed.source, self.loop.evaluator.source):
                source.close()
            if self.loop.lane_steps is not None:
                self.loop.lane_steps.close()
            if not isinstance(error, KeyboardInterrupt):
                self.loop.checkpointer.join()
        summary = summarize(self, ending, error)
        if not self.stands(error):
            self.files.summary(summary)
        self.files.close()
        digest.forget()  # the next job of a sweep may have other devices
        self.logger.finish(summary, 0 if error is None else getattr(error, "exit_code", 1))
        self.console.result(summary, str(self.run_dir), self.logger.how_to_look)

    def stands(self, error: BaseException | None) -> bool:
        """Whether the folder's summary is that of a complete run, to which nothing was added."""
        resume = self.settled.resume if self.settled is not None else None
        nothing_done = isinstance(error, ConfigError) or (resume is not None and resume.finished and resume.in_place)
        return nothing_done and self.files.completed()
