"""A search's study, as the search and its jobs see it: where it is kept, and which trials are not worth going on with.

A search tells its jobs by an environment variable which study they are of; a job's folder is its trial's number. So jobs on
other machines, which share the storage, take part as well. After each evaluation the main rank reports the objective and asks
optuna's pruner; all ranks end at the same step, and the run's state is `pruned`.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch import better
from isobatch.errors import ConfigError, reason
from isobatch.run_folder import layout
from isobatch.stop import Ending, Stopping

if TYPE_CHECKING:
    from isobatch.runtime.distributed import Ranks

log = logging.getLogger("isobatch")
VARIABLE = "ISOBATCH_STUDY"
PRUNERS = {"none": "NopPruner", "median": "MedianPruner", "percentile": "PercentilePruner",
           "halving": "SuccessiveHalvingPruner", "hyperband": "HyperbandPruner", "patient": "PatientPruner"}  # fmt: skip
JOURNAL = "journal:"


def imported() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError("hydra/sweeper", "search", "needs optuna", "pip install 'isobatch[optuna]'") from None
    return optuna


def storage(text: str | None) -> Any:
    """What optuna takes: an URL of a database as it is; `journal:FILE` is a file that several machines may share."""
    if text is None or not text.startswith(JOURNAL):
        return text
    backend = imported().storages.journal.JournalFileBackend(text.removeprefix(JOURNAL))
    return imported().storages.JournalStorage(backend)


def pruner(options: Mapping[str, Any]) -> Any:
    """optuna's pruner of that `name`, with the rest as its arguments.

    Raises:
        ConfigError: it does not take them.
    """
    given = {key: value for key, value in options.items() if key != "name" and value is not None}
    try:
        if options["name"] == "patient":  # which only waits before another one
            return imported().pruners.PatientPruner(None, **given)
        return getattr(imported().pruners, PRUNERS[options["name"]])(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError("hydra.sweeper.pruner", dict(options), f"optuna does not take it ({error})",
                          "leave out what is not of that pruner") from None  # fmt: skip


def announce(text: str, name: str, options: Mapping[str, Any]) -> None:
    """Tell the jobs that are started from now on."""
    os.environ[VARIABLE] = json.dumps({"storage": text, "study": name, "pruner": dict(options)})


def around(stopping: Stopping, run_dir: Path, ranks: Ranks, objective: str | None) -> Stopping:
    """`stopping`, and in a job of a search that prunes also its verdict on the `objective` (see better.objective)."""
    told = os.environ.get(VARIABLE)
    if not told or not run_dir.name.isdigit():
        return stopping
    return Pruned(stopping, StudyTrial(json.loads(told), int(run_dir.name), objective) if ranks.is_main else None, ranks)


class StudyTrial:
    """One trial of the study that `told` (see announce) names, for the main rank of its job."""

    def __init__(self, told: Mapping[str, Any], number: int, objective: str | None):
        self.objective = objective
        optuna = imported()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.load_study(study_name=told["study"], storage=storage(told["storage"]), pruner=pruner(told["pruner"]))
        found = next(trial for trial in study.get_trials(deepcopy=False) if trial.number == number)
        self.trial = optuna.Trial(study, found._trial_id)
        self.known = set(found.intermediate_values)  # of an earlier attempt

    def worth_going_on(self, result: Mapping[str, Any]) -> bool:
        """Report an evaluation's result; False: optuna would prune. A storage that is out of reach prunes nothing."""
        value = better.objective(result, self.objective)
        if value is None:
            return True
        try:
            if result["step"] not in self.known and math.isfinite(value):
                self.trial.report(value, result["step"])
            return math.isfinite(value) and not self.trial.should_prune()
        except Exception as error:  # the driver's, SQLAlchemy's, the file system's
            log.warning("search: the study cannot be reached (%s), and this job goes on", reason(error))
            return True


class Pruned(Stopping):
    """The rules of `inner`, and after them what the study thinks of the trial."""

    def __init__(self, inner: Stopping, trial: StudyTrial | None, ranks: Ranks):
        self.inner, self.trial, self.ranks = inner, trial, ranks
        self.at: int | None = None

    @property
    def ending(self) -> Ending | None:  # type: ignore[override]
        if self.at is None:
            return self.inner.ending
        return Ending(layout.PRUNED, f"the search expects nothing more of it (hydra.sweeper.pruner, step {self.at})")

    def check(self, metrics: Sequence[str] | None) -> None:
        self.inner.check(metrics)

    def request(self) -> int:
        return self.inner.request()

    def out_of_time(self) -> Ending:
        return self.inner.out_of_time()

    def saw(self, result: Mapping[str, Any]) -> None:
        self.inner.saw(result)
        if self.ranks.agree(int(self.trial is not None and not self.trial.worth_going_on(result))):
            self.at = int(result["step"])

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)
