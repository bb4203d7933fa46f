"""Which launcher runs the jobs of a sweep, and whether all of them ended well.

Hydra asks `Plugins.instantiate_launcher` whatever the sweeper is (its own, Optuna's), and hydra_patches passes that on to
`choose`. So `sweep.dry_run` and `sweep.parallel_jobs` work typed, in an experiment file and with every sweeper.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.errors import CompactHydraException

from isobatch.config import SweepOptions, resolved, typed
from isobatch.console.streams import to_stderr
from isobatch.errors import ConfigError
from isobatch.hydra_patches.refusals import stumble
from isobatch.run_folder.reading import usable
from isobatch.runtime.distributed import ranks_from_environment

# choice on the command line -> the package behind it, and the extra that brings it
PLUGINS = {
    ("hydra/launcher", "slurm"): ("hydra_plugins.hydra_submitit_launcher", "slurm"),
    ("hydra/launcher", "local"): ("hydra_plugins.hydra_submitit_launcher", "slurm"),
    ("hydra/launcher", "submitit_slurm"): ("hydra_plugins.hydra_submitit_launcher", "slurm"),
    ("hydra/launcher", "submitit_local"): ("hydra_plugins.hydra_submitit_launcher", "slurm"),
    ("hydra/sweeper", "optuna"): ("optuna", "optuna"),
    ("hydra/sweeper", "search"): ("optuna", "optuna"),
}
FOREVER_MIN = 60 * 24 * 365
_failed: list[JobReturn] = []  # jobs of this launch that did not end well


def check_plugins(words: Sequence[str]) -> None:
    """Refuse a choice whose plugin is not installed, which Hydra would explain with a list of its search path.

    Raises:
        ConfigError: with the command that installs it.
    """
    for word in words:
        key, _, value = word.partition("=")
        package, extra = PLUGINS.get((key, value), ("", ""))
        if package and not installed(package):
            raise ConfigError(key, value, "its plugin is not installed", f"pip install 'isobatch[{extra}]'")


def installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def all_done() -> bool:
    """Whether no job of this launch ended badly. A search that allows failures must not end as if there were none."""
    return not _failed


def choose(make: Callable[[], Any], hydra_context: Any, task_function: Any, config: Any) -> Any:
    """The launcher for a sweep with this (unresolved) `config`; `make()` is the one that hydra.launcher names.

    Raises:
        ConfigError: sweep.* is no good, or cannot be had here.
    """
    options: SweepOptions = typed(SweepOptions, resolved(config.sweep), "sweep.")
    if options.dry_run:
        from isobatch.sweeps.dry_run import DryRun

        if "BasicSweeper" not in str(config.hydra.sweeper):
            raise ConfigError("sweep.dry_run", True, "a search picks its next jobs from the results of those before",
                              "leave it out, or sweep over a grid")  # fmt: skip
        return DryRun(hydra_context, config, options.parallel_jobs)
    launcher = make()
    kind, count = type(launcher).__name__, options.parallel_jobs
    if kind == "BasicLauncher" and count > 1:
        launcher = local_launcher(count, hydra_context, task_function, config)
        kind = "LocalLauncher"
    if count > 1 and kind not in ("LocalLauncher", "SlurmLauncher"):
        raise ConfigError("sweep.parallel_jobs", count, f"{kind} has its own number of jobs at once",
                          "set that one, or leave out hydra/launcher")  # fmt: skip
    if kind in ("LocalLauncher", "SlurmLauncher"):
        from isobatch.sweeps.slots import deal
        from isobatch.sweeps.submitit_launcher import Submitted

        if ranks_from_environment().world_size > 1:
            raise ConfigError("sweep.parallel_jobs", count, "the ranks of torchrun work on one job at a time",
                              "start with python train.py -m; its jobs start their own ranks")  # fmt: skip
        if kind == "SlurmLauncher" and count > 1:
            launcher.params["array_parallelism"] = count
        launcher = Submitted(launcher, deal(count) if kind == "LocalLauncher" else [])
    return Counted(launcher, Path(str(config.hydra.sweep.dir)).absolute())


def local_launcher(count: int, hydra_context: Any, task_function: Any, config: Any) -> Any:
    """submitit's launcher for this machine, set up as Hydra would."""
    try:
        from hydra_plugins.hydra_submitit_launcher.submitit_launcher import LocalLauncher
    except ImportError:
        raise ConfigError("sweep.parallel_jobs", count, "needs the package hydra-submitit-launcher",
                          "pip install 'isobatch[slurm]', or leave sweep.parallel_jobs=1") from None  # fmt: skip
    folder = Path(str(config.hydra.sweep.dir), ".submitit", "%j")
    launcher = LocalLauncher(submitit_folder=str(folder), timeout_min=FOREVER_MIN)
    launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)
    return launcher


class Counted:
    """A launcher that remembers which of its jobs failed: a search may go on over them."""

    def __init__(self, launcher: Any, folder: Path):
        self.launcher, self.folder = launcher, folder

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        self.note({str(number): list(filter_overrides(words)) for number, words in enumerate(job_overrides, initial_job_idx)})
        returns: Sequence[JobReturn] = self.one_by_one(job_overrides, initial_job_idx)
        _failed.extend(r for r in returns if r.status != JobStatus.COMPLETED)
        return returns

    def one_by_one(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """With Hydra's own launcher each job alone: one whose folder cannot be made takes no other down."""
        if type(self.launcher).__name__ != "BasicLauncher":
            found: Sequence[JobReturn] = self.launcher.launch(job_overrides, initial_job_idx=initial_job_idx)
            return found
        returns: list[JobReturn] = []
        words = logging.getLogger(type(self.launcher).__module__)
        words.addFilter(lambda record: not str(record.msg).startswith("Launching"))  # "1 jobs", for each of them
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            try:
                returns += self.launcher.launch([overrides], initial_job_idx=number)
            except OSError as error:
                line = f"isobatch: job {number}: {stumble(error)}"
                to_stderr(line)
                returns.append(JobReturn(overrides=overrides, status=JobStatus.FAILED))
                returns[-1].return_value = CompactHydraException(line)
        return returns

    def note(self, jobs: dict[str, list[str]]) -> None:
        """Leave the list of jobs in the sweep's folder: the comparison lists those that were never begun."""
        before = usable(self.folder, "jobs.json") or {}
        with suppress(OSError):  # a full disk; the jobs will say so
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "jobs.json").write_text(json.dumps({**before, **jobs}, indent=1) + "\n", encoding="utf-8")
