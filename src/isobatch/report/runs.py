"""All runs below some folders, each compared with the first one; large sweeps are read by several processes."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from isobatch.report.distance import Reference, difference
from isobatch.report.metrics import read_metrics
from isobatch.report.read import RunRecord, direction, find_runs, never_begun, read_run
from isobatch.run_folder import layout
from isobatch.runtime import cores

_POINTS_IN_ALL = 60_000  # over all curves of one chart: 500 jobs get 120 points each, up to 150 jobs get 400
_BYTES_WORTH_A_POOL = 200_000_000  # about a second of reading, which is what starting the processes costs
_Job = tuple[str, Path]


def read_runs(folders: Sequence[Path], processes: int = 1) -> list[RunRecord]:
    """All runs below the folders, each with its difference to the first one that logged a training loss.

    processes: how many may read a large sweep; more than 1 needs a main module that can be imported without running.
    Raises ReportError as `find_runs` does. Files that are missing or damaged make a run poorer, never an error.
    """
    jobs = find_runs(folders)
    limit = max(60, min(400, _POINTS_IN_ALL // len(jobs)))
    runs: list[RunRecord] = []
    for job in jobs:  # up to the reference
        run = _read(job, limit, None)
        runs.append(run)
        if len(run.metrics.steps):
            reference = Reference(run.job, run.folder, run.summary, run.metrics)
            run.difference = difference(reference, run.folder, run.summary, run.metrics)
            rest = jobs[len(runs) :]
            runs += _each(functools.partial(_read, limit=limit, reference=reference), rest, processes)
            run.metrics.drop_losses()
            break
    return runs + never_begun(jobs)


def _read(job: _Job, limit: int, reference: Reference | None) -> RunRecord:
    """One run; with a reference it is compared and lets go of its losses, so that 500 of them fit in memory."""
    run = read_run(*job)
    run.metrics = read_metrics(run.folder / layout.METRICS, limit, direction)
    if reference is not None:
        run.difference = difference(reference, run.folder, run.summary, run.metrics)
        run.metrics.drop_losses()
    return run


def _each(read: Callable[[_Job], RunRecord], jobs: Sequence[_Job], processes: int) -> Iterator[RunRecord]:
    """The runs in order, read here or by a pool; what a pool cannot read is read here."""
    size = sum(file.stat().st_size for _, folder in jobs if (file := folder / layout.METRICS).is_file())
    done = 0
    if processes > 1 and size > _BYTES_WORTH_A_POOL:
        try:
            # At the exit of the interpreter, where a sweep with a failed job reports, these raise RuntimeError.
            from concurrent.futures import ProcessPoolExecutor

            # Spawned, not forked: this process may hold the threads of a training run.
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(processes, mp_context=context) as pool:
                for run in pool.map(read, jobs, chunksize=4):
                    yield run
                    done += 1
        except (RuntimeError, OSError):  # a worker that died (BrokenProcessPool) included
            pass
    yield from map(read, itertools.islice(jobs, done, None))


def usable_cores() -> int:
    """Cores that this process may use, at most 8: beyond that the disk is the limit."""
    return min(8, cores.usable())
