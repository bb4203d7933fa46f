"""`hydra/sweeper=search`: optuna picks the jobs. A trial is a job, its number the job's folder.

Every trial draws from a seed of its own (sampler.seed and its number): a study that is begun again draws the same trials,
and processes that share one in a storage draw different ones, since the storage gives each number once.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from isobatch import better, hydra_patches, study
from isobatch import config as configuration
from isobatch.checks import choice, positive, within
from isobatch.errors import ConfigError, reason
from isobatch.run_folder import layout
from isobatch.run_folder.reading import usable
from isobatch.study import imported

log = logging.getLogger("isobatch")
SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler"}
OWNER = "isobatch.process"  # of a trial: whose it is, to tell one that runs from one whose process died


class Search(Sweeper):
    """
    Args (conf/hydra/sweeper/search.yaml says what each one means):
        direction: minimize, maximize, or None: as the objective wants it.
        pruner: name and arguments of optuna's: jobs that promise nothing end early.
        storage: an URL of optuna's, or journal:FILE; None keeps the study in memory. study_name: in that storage.
        n_trials: of the study in all. n_jobs: asked for together.
        max_failure_rate: a larger share of failed jobs of one round ends the search.
        sampler: name and seed. params: settings to search over, as on the command line.
    """

    def __init__(self, n_trials: int = 20, n_jobs: int = 1, direction: str | None = None, storage: str | None = None,
                 study_name: str | None = None, max_failure_rate: float = 1.0, sampler: Mapping[str, Any] | None = None,
                 params: Mapping[str, Any] | None = None, pruner: Mapping[str, Any] | None = None) -> None:  # fmt: skip
        self.pruner = {"name": "none", **(pruner or {})}
        self.n_trials, self.n_jobs, self.direction, self.storage = n_trials, n_jobs, direction, storage
        self.study_name, self.max_failure_rate = study_name, max_failure_rate
        self.sampler, self.params = {"name": "tpe", "seed": 0, **(sampler or {})}, dict(params or {})
        self._check()

    def _check(self) -> None:
        positive("hydra.sweeper.n_trials", self.n_trials)
        positive("hydra.sweeper.n_jobs", self.n_jobs)
        within("hydra.sweeper.max_failure_rate", self.max_failure_rate, 0, 1)
        choice("hydra.sweeper.direction", self.direction, (None, "minimize", "maximize"))
        choice("hydra.sweeper.pruner.name", self.pruner["name"], tuple(study.PRUNERS))
        choice("hydra.sweeper.sampler.name", self.sampler["name"], tuple(SAMPLERS))

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.config, self.context = config, hydra_context
        self.launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)  # fmt: skip

    def sweep(self, arguments: list[str]) -> Any:
        """Run trials until the study has n_trials of them; SystemExit(2) with one line where that cannot begin."""
        try:
            return self._search(arguments)
        except ConfigError as refusal:
            raise hydra_patches.refusals.Refusal(f"isobatch: {refusal}") from None

    def _search(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        parser = OverridesParser.create(config_loader=self.context.config_loader)
        words = parser.parse_overrides([*(f"{key}={value}" for key, value in self.params.items()), *arguments])
        searched = {word.get_key_element(): word for word in words if word.is_sweep_override()}
        fixed = [str(word.input_line) for word in words if not word.is_sweep_override()]
        if not searched:
            raise ConfigError("hydra/sweeper", "search", "there is nothing to search over",
                              "give a setting a range, as in 'optimizer.lr=interval(0.0001, 0.1)'")  # fmt: skip
        assert self.config is not None  # since setup
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / layout.MULTIRUN)
        if self.pruner["name"] != "none" and self.storage is None:
            self.storage = f"{study.JOURNAL}{(folder / 'study.log').absolute()}"  # which the jobs can see too
        found = self._study(fixed, searched)
        rounds: list[Sequence[JobReturn]] = []
        try:
            if self.pruner["name"] != "none":
                study.announce(str(self.storage), found.study_name, self.pruner)
            while trials := self._next(found):
                jobs = [[*fixed, *(f"{key}={value}" for key, value in self._drawn(found, trial, searched).items())]
                        for trial in trials]  # fmt: skip
                rounds.append(self._run(found, trials, jobs, folder))
        finally:
            os.environ.pop(study.VARIABLE, None)
        self._tell_best(found, folder)
        return rounds

    def _study(self, fixed: Sequence[str], searched: Mapping[str, Override]) -> Any:
        optuna = imported()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        direction = self.direction or self._direction(fixed, searched)
        log.info("search: %s %s", direction, "accuracy" if direction == "maximize" else "loss")
        name = self.study_name or ("isobatch" if self.storage else None)
        try:
            return optuna.create_study(storage=study.storage(self.storage), study_name=name, direction=direction,
                                       load_if_exists=True, pruner=study.pruner(self.pruner))  # fmt: skip
        except ConfigError:
            raise
        except Exception as error:  # SQLAlchemy's, optuna's and the driver's
            said = reason(error)
            raise ConfigError("hydra.sweeper.storage", self.storage, f"cannot be opened ({type(error).__name__}: {said})",
                              "set it to journal:FILE, sqlite:///FILE.db, or to null") from None  # fmt: skip

    def _direction(self, fixed: Sequence[str], searched: Mapping[str, Override]) -> str:
        """What the objective of such a job wants: accuracy is maximised; data without classes has a loss alone."""
        first = [f"{key}={next(iter(texts(word)))}" for key, word in searched.items()]
        try:
            job = self.context.config_loader.load_sweep_config(self.config, [*fixed, *first])
            config = configuration.load(configuration.plain_config(hydra_patches.without_hydra(job), Path.cwd()))
            configuration.check_inputs(config)
            if config.sweep.objective is not None:
                return "maximize" if better.sign(config.sweep.objective, config.sweep.mode) > 0 else "minimize"
            return "maximize" if config.data.load(None, config.seed).info.num_classes else "minimize"
        except ConfigError:  # this choice may be refused where others are not; the job says so itself
            return "maximize"

    def _next(self, study: Any) -> list[Any]:
        """The trials of one round: first those whose process died, then new ones while there are less than n_trials."""
        states = imported().trial.TrialState
        known = study.get_trials(deepcopy=False)
        owner = f"{socket.gethostname()}:{os.getpid()}"
        left = [trial for trial in known if trial.state == states.RUNNING and abandoned(trial.user_attrs.get(OWNER))]
        chosen = [imported().Trial(study, trial._trial_id) for trial in left[: self.n_jobs]]
        while len(chosen) < self.n_jobs and len(study.get_trials(deepcopy=False)) < self.n_trials:
            trial = study.ask()
            if trial.number >= self.n_trials:  # another process was quicker
                study.tell(trial, state=states.PRUNED)
                break
            chosen.append(trial)
        for trial in chosen:
            trial.set_user_attr(OWNER, owner)
        return chosen

    def _drawn(self, study: Any, trial: Any, searched: Mapping[str, Override]) -> dict[str, str]:
        kind = getattr(imported().samplers, SAMPLERS[self.sampler["name"]])
        seed = self.sampler.get("seed")
        study.sampler = trial.study.sampler = kind(seed=None if seed is None else int(seed) * 1_000_003 + trial.number)
        return {key: drawn(trial, key, word) for key, word in searched.items()}

    def _run(self, study: Any, trials: Sequence[Any], jobs: Sequence[list[str]], folder: Path) -> list[JobReturn]:
        states = imported().trial.TrialState
        returns: list[JobReturn] = []
        for begin, end in consecutive([trial.number for trial in trials]):
            returns += self.launcher.launch(jobs[begin:end], initial_job_idx=trials[begin].number)
        failed = 0
        for trial, done in zip(trials, returns, strict=True):
            value = done._return_value if done.status == JobStatus.COMPLETED else None
            if value is not None and self.pruner["name"] != "none" and pruned(folder / str(trial.number)):
                study.tell(trial, state=states.PRUNED)
            elif isinstance(value, (int, float)) and math.isfinite(value):
                study.tell(trial, float(value))
            else:
                failed += 1
                study.tell(trial, state=states.FAIL)
        if failed / len(trials) > self.max_failure_rate:
            raise ConfigError("hydra.sweeper.max_failure_rate", self.max_failure_rate, f"{failed} of {len(trials)} jobs failed",
                              "see their train.log, or raise it")  # fmt: skip
        return returns

    def _tell_best(self, study: Any, folder: Path) -> None:
        with suppress(ValueError):  # no trial completed
            best = study.best_trial
            found = {"name": "optuna", "best_params": dict(best.params), "best_value": best.value, "best_job": best.number}
            OmegaConf.save(OmegaConf.create(found), folder / "optimization_results.yaml")
            shown = ", ".join(f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
                              for key, value in best.params.items())  # fmt: skip
            log.info("search: best %.6g in job %d with %s", best.value, best.number, shown)


def pruned(folder: Path) -> bool:
    """Whether the job in `folder` ended because the study expected nothing more of it."""
    return (usable(folder, layout.SUMMARY) or {}).get("state") == layout.PRUNED


def abandoned(owner: str | None) -> bool:
    """Whether the process `host:pid` that a trial belongs to is gone; of another host nobody here can tell."""
    host, _, pid = (owner or "").rpartition(":")
    if host != socket.gethostname() or not pid.isdigit():
        return owner is None
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return int(pid) == os.getpid()  # of an earlier round of this very process


def texts(word: Override) -> list[str]:
    """The values of a discrete sweep as on the command line; of an interval its ends."""
    value = word.value()
    if isinstance(value, IntervalSweep):
        return [str(value.start), str(value.end)]
    return list(word.sweep_string_iterator())


def drawn(trial: Any, key: str, word: Override) -> str:
    """This trial's value of one setting; `tag(log, interval(...))` draws on a log scale, `int(...)` whole numbers."""
    value = word.value()
    if isinstance(value, IntervalSweep):
        whole, log_scale = isinstance(value.start, int) and isinstance(value.end, int), "log" in value.tags
        return str((trial.suggest_int if whole else trial.suggest_float)(key, value.start, value.end, log=log_scale))
    if isinstance(value, RangeSweep) and all(isinstance(part, int) for part in (value.start, value.stop, value.step)):
        last = list(value.range())[-1]
        return str(trial.suggest_int(key, value.start, last, step=value.step))
    return str(trial.suggest_categorical(key, texts(word)))


def consecutive(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Slices of `numbers` that count up by one: a launcher numbers its jobs like that."""
    starts = [i for i in range(len(numbers)) if i == 0 or numbers[i] != numbers[i - 1] + 1]
    return list(zip(starts, [*starts[1:], len(numbers)], strict=True))
