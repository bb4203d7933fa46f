"""Jobs in processes of their own, through submitit: several at once on this machine, or an array on a cluster."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.errors import CompactHydraException

from isobatch.console.streams import to_stderr
from isobatch.sweeps import slurm_queue
from isobatch.sweeps.slots import Slot
from isobatch.sweeps.submitit_job import SubmittedJob

TICK_S = 0.2
HARD_S = 10.0  # from the second request to stop until jobs are killed
INIT = {"max_num_timeout"}  # what submitit wants to know when the executor is made


class JobLost(CompactHydraException):
    """A job that ended without a result: killed, or stopped by a signal."""


@dataclass
class Running:
    number: int
    overrides: list[str]
    slot: Slot | None
    job: Any
    since: float = field(default_factory=time.monotonic)


class Submitted:
    """A launcher over the plugin's launcher.

    Args:
        slots: parts of this machine, one for each job at a time; empty: the cluster decides what runs when.
    """

    def __init__(self, launcher: Any, slots: Sequence[Slot]):
        self.launcher, self.slots = launcher, slots
        self.folder = Path(str(launcher.config.hydra.sweep.dir)).absolute()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run them all; one that fails stops no other. A request to stop ends all of them and is passed on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        executor = self.executor()
        jobs = [(number, list(overrides)) for number, overrides in enumerate(job_overrides, initial_job_idx)]
        where = f"{len(self.slots)} at a time on this machine" if self.slots else "in the queue"
        to_stderr(f"isobatch: {len(jobs)} job(s), {where}; their output: {self.folder}/<job>/train.log")
        running: list[Running] = []
        done: dict[int, JobReturn] = {}
        try:
            if self.slots:
                self.work_off(executor, deque(jobs), running, done)
            else:
                queued = submitted(executor, SubmittedJob(self.launcher), jobs)
                running += [Running(*job, None, its) for job, its in zip(jobs, queued, strict=True)]
                queue = slurm_queue.Queue()
                if not slurm_queue.accounts():
                    to_stderr("isobatch: this SLURM keeps no accounts (sacct), so its queue is asked which jobs have ended")
                while running:
                    gone = queue.look({one.job.job_id for one in running})
                    if not collect(running, done, gone):
                        time.sleep(5 * TICK_S)
        except BaseException:
            end(running)
            raise
        return [done[number] for number, _ in jobs]

    def executor(self) -> Any:
        """submitit's, with the plugin's parameters."""
        import submitit
        from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf

        kind, params = self.launcher._EXECUTOR, dict(self.launcher.params)
        folder = params.pop("submitit_folder")
        init = {f"{kind}_{key}": params.pop(key) for key in INIT & set(params)}
        executor = submitit.AutoExecutor(cluster=kind, folder=folder, **init)
        shared = BaseQueueConf.__dataclass_fields__
        executor.update_parameters(**{k if k in shared else f"{kind}_{k}": v for k, v in params.items()})
        return executor

    def work_off(self, executor: Any, waiting: deque[tuple[int, list[str]]], running: list[Running],
                 done: dict[int, JobReturn]) -> None:  # fmt: skip
        free = deque(self.slots)
        while waiting or running:
            while waiting and free:
                number, overrides = waiting.popleft()
                slot = free.popleft()
                words = " ".join(filter_overrides(overrides))
                job = start(executor, SubmittedJob(self.launcher, slot, os.getpid()), arguments(number, overrides))
                running.append(Running(number, overrides, slot, job))
                to_stderr(f"isobatch: job {number} starts on {slot}: {words}")
            ended = collect(running, done)
            free.extend(one.slot for one in ended if one.slot is not None)
            if not ended:
                time.sleep(TICK_S)


def arguments(number: int, overrides: list[str]) -> tuple[Any, ...]:
    """What the plugin's launcher is called with for one job."""
    return overrides, "hydra.sweep.dir", number, f"job_id_for_{number}", Singleton.get_state()


def submitted(executor: Any, task: SubmittedJob, jobs: list[tuple[int, list[str]]]) -> list[Any]:
    """The cluster's jobs.

    Raises:
        SystemExit: it takes none of them, in its own words.
    """
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        found: list[Any] = executor.map_array(task, *zip(*(arguments(*job) for job in jobs), strict=True))
    except (FailedJobError, FailedSubmissionError, OSError) as error:
        raise SystemExit(f"isobatch: the cluster did not take the jobs: {slurm_queue.refusal(error)}; "
                         "set what it names in hydra.launcher") from None  # fmt: skip
    return found


def start(executor: Any, task: SubmittedJob, job: tuple[Any, ...]) -> Any:
    """Submit; submitit's processes ignore Ctrl-C (they would give a job one second), since this one tells them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return executor.submit(task, *job)
    finally:
        signal.signal(signal.SIGINT, before)


def collect(running: list[Running], done: dict[int, JobReturn], gone: Collection[str] = ()) -> list[Running]:
    """Move what has ended from `running` to `done`, with a line for each. `gone`: ids that the queue does not know any more."""
    over = [one for one in running if one.job.task(0).done()]  # of several tasks, rank 0 tells the story
    ended = over + [one for one in running if one not in over and one.job.job_id in gone]
    for one in ended:
        running.remove(one)
        done[one.number] = result(one) if one in over else lost(one, "cancelled or killed: the queue does not know it any more")
        said = [line for line in (one.job.task(0).stderr() or "").splitlines() if line.startswith("isobatch: ")]
        for line in said:
            to_stderr(line)
        if done[one.number].status == JobStatus.COMPLETED:
            value = done[one.number].return_value
            found = f" with {value:.6g}" if isinstance(value, float) else ""
            to_stderr(f"isobatch: job {one.number} ended{found} after {time.monotonic() - one.since:.1f} s")
        elif not said or isinstance(done[one.number]._return_value, JobLost):
            to_stderr("isobatch: " + str(done[one.number]._return_value).removeprefix("isobatch: "))
    return ended


def result(one: Running) -> JobReturn:
    """What the job returned; a failure in its place where it could not return anything."""
    main = one.job.task(0)
    main._results_timeout_s = 2  # the process is gone: 15 s more would bring no result
    try:
        found: JobReturn = main.result()
        return found
    except Exception as error:
        words = str(error).splitlines()
        reason = next((line for line in reversed(words) if line.strip(" -")), type(error).__name__)
        return lost(one, reason.strip()[:200])


def lost(one: Running, reason: str) -> JobReturn:
    ended = JobReturn(overrides=one.overrides, status=JobStatus.FAILED)
    ended.return_value = JobLost(f"isobatch: job {one.number} ended without a result ({reason}); "
                                 f"see {one.job.task(0).paths.stderr}")  # fmt: skip
    return ended


def end(running: list[Running]) -> None:
    """Stop all jobs after their checkpoints; asked again, at once."""
    if not running:
        return
    to_stderr(f"isobatch: stopping {len(running)} job(s) after a checkpoint")
    local = [one for one in running if one.job._process is not None] if hasattr(running[0].job, "_process") else []
    for one in running:
        if one not in local:
            with suppress(Exception):
                one.job.cancel(check=False)
    slurm_queue.Queue.wait([one.job.job_id for one in running if one not in local])  # the report tells of their last state
    told: set[int] = set()
    deadline = float("inf")
    while local := [one for one in local if one.job._process.poll() is None]:
        try:
            for pid in training_processes(local):  # one that is started again meanwhile has not heard it yet
                if pid not in told or time.monotonic() > deadline:
                    told.add(pid)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM)
            time.sleep(TICK_S)
        except (KeyboardInterrupt, SystemExit):
            deadline = min(deadline, time.monotonic() + HARD_S)
            told.clear()  # the second request


def training_processes(running: Sequence[Running]) -> list[int]:
    """Process ids of the jobs' training; submitit's own process between ends with them."""
    found: list[int] = []
    for one in running:
        children = Path(f"/proc/{one.job._process.pid}/task/{one.job._process.pid}/children")
        with suppress(OSError):
            found += map(int, children.read_text().split())
    return found
