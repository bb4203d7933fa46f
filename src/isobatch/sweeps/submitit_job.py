"""A job in the process that submitit started for it, on this machine or on a cluster's.

submitit's own handler of the warning signal would end a step halfway. Here the signal asks the training to stop as
SIGTERM does, after a checkpoint, and the handler gets its turn then: it puts the job back into the queue.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from isobatch import hydra_patches, launch
from isobatch.launch import meeting
from isobatch.sweeps.slots import Slot


@dataclass
class SubmittedJob:
    """Called with what the plugin's launcher is called with; pickled on the way.

    Args:
        launcher: the plugin's, which composes and runs one job.
        slot: the part of this machine that it may use; None on a cluster, where the queue decides.
        parent: process id of the sweep, whose death ends the job; 0: nobody's.
    """

    launcher: Any
    slot: Slot | None = None
    parent: int = 0
    warned: threading.Event | None = field(default=None, init=False)

    def __call__(self, *job: Any) -> Any:
        if self.slot is not None:
            os.setsid()  # Ctrl-C reaches the sweep, which tells its jobs
            self.slot.enter()
        signal.signal(signal.SIGTERM, launch.early)
        if self.parent:
            end_with(self.parent)
        import submitit

        environment = submitit.JobEnvironment()
        self.warned, requeue = take_over_warning(environment._usr_sig())
        code = 1
        try:
            if join(environment) > 0:
                return self.follow()
            with hydra_patches.active():  # the plugin composes the job's config once more, here
                result = self.launcher(*job)
            code = int(result.status.name != "COMPLETED")
            return result
        except SystemExit as leaving:
            launch.heard()
            code = leaving.code if isinstance(leaving.code, int) else 1
            raise
        finally:
            launch.finish(code)
            if self.warned.is_set() and code > 128:
                requeue(environment._usr_sig(), None)  # ends this process; rank 0 has the job started again

    def follow(self) -> None:
        """A rank other than 0. It always leaves a result: the job's story is rank 0's."""
        try:
            launch.follow()
        except SystemExit:
            return

    def checkpoint(self, *job: Any) -> Any:
        """What runs when the job starts again: the same, since its folder says how far it came."""
        import submitit

        return submitit.helpers.DelayedSubmission(SubmittedJob(self.launcher, self.slot, self.parent), *job)


def take_over_warning(signum: int) -> tuple[threading.Event, Any]:
    """Turn `signum` into SIGTERM to this process; returns whether it came and the handler that stood there before.

    A cluster sends it to every process of the job. Ranks and data workers inherit the blocked mask, where it would
    kill them otherwise; this process takes it in a thread of its own.
    """
    warned, before = threading.Event(), signal.getsignal(signum)

    def stop(*_: Any) -> None:
        if not warned.is_set():
            warned.set()
            if not launch.STOP.requested:  # a preempted job got SIGTERM before: a second one would cost the checkpoint
                os.kill(os.getpid(), signal.SIGTERM)

    def wait() -> None:
        signal.sigwait({signum})
        stop()

    signal.signal(signum, stop)  # a library's thread that started earlier does not block it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signum})
    threading.Thread(target=wait, daemon=True).start()
    return warned, before


def join(environment: Any) -> int:
    """Where a job has several tasks they are its ranks, under the names that torchrun uses. Returns this one's rank."""
    if environment.num_tasks == 1:
        return 0
    rank: int = environment.global_rank
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(environment.num_tasks), LOCAL_RANK=str(environment.local_rank),
        LOCAL_WORLD_SIZE=str(environment.num_tasks // environment.num_nodes), MASTER_ADDR=environment.hostnames[0],
    )  # fmt: skip
    meeting.by_job(environment.job_id, os.environ)  # two jobs on one node must not meet
    return rank


def end_with(parent: int) -> None:
    """Stop this process, after a checkpoint, when process `parent` is gone."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        sys.exit(1)

    def wait() -> None:
        watch = select.poll()
        watch.register(handle, select.POLLIN)
        watch.poll()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
