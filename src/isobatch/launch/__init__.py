"""Start or join the ranks of a job, and say how it ended.

`run` is called once per job in the process that runs Hydra. It decides where the training happens: in this process, on
ranks of its own (spawn.py), or on the ranks of torchrun (torchrun.py), of which only rank 0 runs Hydra.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isobatch import config as configuration
from isobatch import tasks
from isobatch.errors import ConfigError, Stopped
from isobatch.launch import devices, job, parent, spawn, torchrun
from isobatch.launch.outcome import EARLY, Outcome, RankFailed, RunFolder
from isobatch.launch.signals import STOP, Terminated, early, heard
from isobatch.launch.torchrun import follow
from isobatch.launch.watchdog import witnessed
from isobatch.runtime.distributed import Ranks, joined, ranks_from_environment

__all__ = [
    "EARLY",
    "STOP",
    "RankFailed",
    "Terminated",
    "early",
    "finish",
    "follow",
    "heard",
    "run",
    "settling",
    "stops_settled",
]

MOST_RANKS = 1024  # a typing error must not fill the process table


def run(plain: dict[str, Any], run_dir: Path) -> float | None:
    """Train one job; `plain` is its finished config, `run_dir` its folder, which exists. Returns what run_job returned.

    However it ends, the folder says so in train.log and summary.json.

    Raises:
        ConfigError: refused before training.
        RankFailed: it failed; `trace` is the traceback of the rank that failed first.
        Stopped: ended by a signal.
    """
    run_dir = run_dir.resolve()
    STOP.requested = 0
    with settling(run_dir) as folder:
        outcome = _run(plain, run_dir)
    folder.settle(outcome)
    value = outcome.raise_unless_done()
    if STOP.requested:  # it came when the job was as good as done: the job stands, but a sweep ends here
        raise Stopped(STOP.requested)
    return value


@contextmanager
def settling(run_dir: Path) -> Iterator[RunFolder]:
    """Whatever leaves the block stands in the folder's train.log and summary.json.

    Raises:
        ConfigError, RankFailed, Stopped: in place of whatever was raised.
    """
    folder = RunFolder(run_dir.resolve())
    try:
        yield folder
        return
    except KeyboardInterrupt:
        outcome = Outcome("stopped", line=EARLY, signum=signal.SIGINT)
    except SystemExit as leaving:  # SIGTERM at a moment when nobody trains
        heard()
        outcome = Outcome("stopped", line=EARLY, signum=_signal_of(leaving))
    except Exception as error:
        outcome = Outcome.of(error)
    folder.settle(outcome)
    if outcome.line == EARLY:  # of a stop while training its handler has spoken
        print(f"isobatch: {EARLY}", file=sys.stderr, flush=True)
    outcome.raise_unless_done()


@contextmanager
def stops_settled(run_dir: Path) -> Iterator[None]:
    """Around `settling` and `run`: a stop that comes between the two stands in the folder too."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as leaving:
        heard()
        signum = _signal_of(leaving) if isinstance(leaving, SystemExit) else signal.SIGINT
        RunFolder(run_dir).settle(Outcome("stopped", line=EARLY, signum=signum))
        raise


def _signal_of(leaving: SystemExit) -> int:
    return leaving.code - 128 if isinstance(leaving.code, int) and leaving.code > 128 else signal.SIGTERM


def _run(plain: dict[str, Any], run_dir: Path) -> Outcome:
    config = configuration.load(plain)
    task = tasks.of(config)
    if task.reads_data:
        configuration.check_inputs(config)
    if task.logs:
        config.logger.check()
    ranks, options = ranks_from_environment(), config.parallel
    parallel = plain["parallel"]
    if joined():
        options.check(ranks)
        check_joined(parallel, ranks)
        if ranks.world_size > 1:
            parent.at_the_end(lambda line: RunFolder(run_dir).settle(Outcome("failed", line=line)))
            with witnessed(run_dir):
                return torchrun.run_led(plain, run_dir, ranks, job.TARGET)
        count = 1
    else:
        count = options.num_processes or (1 if config.device == "cpu" else max(1, devices.count_gpus()))  # 0: one per GPU
        if task.one_process:
            count = 1
    if count > MOST_RANKS:
        raise ConfigError("parallel.nproc", count, "is more than a run starts itself on one machine",
                          f"set at most {MOST_RANKS}, or start torchrun on several; task=plan takes any number")  # fmt: skip
    shown = devices.visible_devices(parallel.get("devices"), os.environ.get(devices.VARIABLE))
    if count > 1 or not devices.can_show(shown):
        environ = {**os.environ, devices.VARIABLE: shown} if shown is not None else dict(os.environ)
        imports = ("torch._dynamo", *getattr(config.model, "imports", ()))  # the first: by every optimizer, 2 s
        return spawn.run_ranks(plain, run_dir, count, environ, job.TARGET, imports)
    with witnessed(run_dir), devices.showing(shown):
        return job.execute(plain, run_dir, Ranks(), target=job.TARGET)


def check_joined(parallel: dict[str, Any], ranks: Ranks) -> None:
    """Refuse settings that contradict the ranks that somebody else has started.

    Raises:
        ConfigError: another number of processes than there are ranks.
    """
    nproc = parallel.get("nproc")
    if nproc is not None and nproc != ranks.world_size:
        raise ConfigError("parallel.nproc", nproc, f"was started as {ranks.world_size} rank(s)",
                          "leave parallel.nproc=null under torchrun, or start without it")  # fmt: skip


def finish(code: int) -> None:
    """Last of all in the process that runs Hydra: let the other ranks go, and leave no fork server."""
    torchrun.finish(code)
    spawn.stop_fork_server()
    if code and "TORCHELASTIC_RUN_ID" in os.environ and sys.exc_info()[0] is None:  # else the stack is still to be shown
        torchrun.leave(code)
