"""`hydra/sweeper=search` on optuna: what is drawn, what a storage keeps, and which way is better."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import BASE, rows, summary, train, train_ranks
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode

from isobatch import hydra_patches, study
from isobatch.config import conf_folder
from isobatch.hydra_patches.refusals import Refusal
from isobatch.study import VARIABLE
from isobatch.sweeps import search
from isobatch.sweeps.search import Search, abandoned, consecutive

pytest.importorskip("optuna", reason="pip install 'isobatch[optuna]'")
LR = "optimizer.lr=tag(log, interval(0.0001, 0.1))"
Jobs = list[tuple[int, list[str]]]


class Launcher:
    """Notes the jobs, and returns `value` of their settings; None is a job that failed."""

    def __init__(self, value: Callable[[list[str]], float | None]):
        self.value, self.jobs = value, Jobs()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        returns = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            self.jobs.append((number, list(overrides)))
            value = self.value(list(overrides))
            done = JobReturn(overrides=overrides, status=JobStatus.FAILED if value is None else JobStatus.COMPLETED)
            done.return_value = value if value is not None else RuntimeError("refused")
            returns.append(done)
        return returns


def searched(folder: Path, *words: str, value: Callable[[list[str]], float | None] = lambda overrides: 0.5,
             wrap: Callable[[Any], Any] = lambda launcher: launcher) -> tuple[Jobs, str]:  # fmt: skip
    """(jobs that ran, optimization_results.yaml) of `-m hydra/sweeper=search words`."""
    launcher = Launcher(value)
    with hydra_patches.active(), initialize_config_dir(str(conf_folder()), version_base="1.3"):
        Plugins.instance().register(Search)
        loader = GlobalHydra.instance().config_loader()
        command = ["hydra/sweeper=search", f"hydra.sweep.dir={folder}", *[w for w in words if w.startswith("hydra.")]]
        config = loader.load_configuration("config", [*command, *words[len(command) - 2 :]], RunMode.MULTIRUN)
        sweeper = Plugins.instance()._instantiate(config.hydra.sweeper)
        sweeper.config, sweeper.context = config, SimpleNamespace(config_loader=loader)
        sweeper.launcher = wrap(launcher)
        sweeper.sweep([word for word in words if not word.startswith("hydra.")])
    results = folder / "optimization_results.yaml"
    return launcher.jobs, results.read_text() if results.exists() else ""


def lr(overrides: list[str]) -> float:
    return float(next(word for word in overrides if word.startswith("optimizer.lr=")).partition("=")[2])


def test_trials_are_jobs_in_the_ranges_and_the_same_again(tmp_path: Path) -> None:
    words = ("hydra.sweeper.n_trials=6", LR, "batch.micro=8,16", "model.drop_rate=choice(0, 0.2)", "seed=range(1, 9, 2)",
             "optimizer.weight_decay=interval(0.0, 0.5)", "steps=int(interval(2, 4))", "logger=none")  # fmt: skip
    jobs, found = searched(tmp_path / "a", *words, value=lambda overrides: -abs(lr(overrides) - 0.01))
    assert [number for number, _ in jobs] == list(range(6)) and all("logger=none" in overrides for _, overrides in jobs)
    for _, overrides in jobs:
        drawn = dict(word.split("=") for word in overrides)
        assert 1e-4 <= float(drawn["optimizer.lr"]) <= 0.1 and drawn["batch.micro"] in ("8", "16")
        assert drawn["seed"] in ("1", "3", "5", "7") and drawn["steps"] in ("2", "3", "4")
        assert drawn["model.drop_rate"] in ("0", "0.2")
    best = min(jobs, key=lambda job: abs(lr(job[1]) - 0.01))
    assert f"best_job: {best[0]}" in found and len({lr(overrides) for _, overrides in jobs}) == 6
    assert searched(tmp_path / "b", *words, value=lambda overrides: -abs(lr(overrides) - 0.01))[0] == jobs
    other = searched(tmp_path / "c", *words, "hydra.sweeper.sampler.seed=1")[0]
    assert {lr(overrides) for _, overrides in other}.isdisjoint(lr(overrides) for _, overrides in jobs)


def test_a_storage_is_gone_on_with_and_the_same_command_adds_none(tmp_path: Path) -> None:
    url = f"hydra.sweeper.storage=sqlite:///{tmp_path / 'new.db'}"
    first, _ = searched(tmp_path / "a", url, "hydra.sweeper.n_trials=3", LR, value=lr)
    again, found = searched(tmp_path / "a", url, "hydra.sweeper.n_trials=3", LR, value=lr)
    more, _ = searched(tmp_path / "a", url, "hydra.sweeper.n_trials=5", LR, value=lr)
    assert len(first) == 3 and again == [] and "best_value" in found
    assert [number for number, _ in more] == [3, 4]
    assert len({lr(overrides) for _, overrides in [*first, *more]}) == 5


def test_a_trial_whose_process_died_is_run_again_with_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException): ...

    def kill(overrides: list[str]) -> float:
        raise Killed

    url = f"hydra.sweeper.storage=sqlite:///{tmp_path / 'new.db'}"
    with pytest.raises(Killed):
        searched(tmp_path / "a", url, "hydra.sweeper.n_trials=2", LR, value=kill)
    elsewhere: Jobs = []
    monkeypatch.setattr(search, "abandoned", lambda owner: False)  # another process is at it: nobody takes it over
    elsewhere, _ = searched(tmp_path / "a", url, "hydra.sweeper.n_trials=2", LR, value=lr)
    assert [number for number, _ in elsewhere] == [1]
    monkeypatch.setattr(search, "abandoned", lambda owner: True)
    taken, _ = searched(tmp_path / "a", url, "hydra.sweeper.n_trials=2", LR, value=lr)
    assert [number for number, _ in taken] == [0] and lr(taken[0][1]) != lr(elsewhere[0][1])


def test_whose_process_is_gone() -> None:
    import os
    import socket

    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    host = socket.gethostname()
    assert abandoned(f"{host}:{done.pid}") and abandoned(f"{host}:{os.getpid()}") and abandoned(None)
    assert not abandoned(f"{host}:1") and not abandoned(f"{host}x:{done.pid}")


def test_two_commands_on_one_study_draw_different_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, other = f"hydra.sweeper.storage=sqlite:///{tmp_path / 'new.db'}", Jobs()

    def in_turn(overrides: list[str]) -> float:
        if not other:  # while the first trial of the first command runs
            other.extend(searched(tmp_path / "b", url, "hydra.sweeper.n_trials=4", LR, value=lr)[0])
        return lr(overrides)

    monkeypatch.setattr(search, "abandoned", lambda owner: False)
    jobs = _nested(tmp_path / "a", url, Launcher(in_turn))
    numbers = [number for number, _ in [*jobs, *other]]
    assert sorted(numbers) == [0, 1, 2, 3] and len({lr(overrides) for _, overrides in [*jobs, *other]}) == 4


def _nested(folder: Path, url: str, launcher: Launcher) -> Jobs:
    """A command whose jobs run another one: Hydra's loader is let go of before the first job."""
    with hydra_patches.active(), initialize_config_dir(str(conf_folder()), version_base="1.3"):
        Plugins.instance().register(Search)
        loader = GlobalHydra.instance().config_loader()
        command = ["hydra/sweeper=search", f"hydra.sweep.dir={folder}", url]
        config = loader.load_configuration("config", command, RunMode.MULTIRUN)
    sweeper = Search(n_trials=4, storage=url.partition("=")[2], direction="maximize")
    sweeper.config, sweeper.context, sweeper.launcher = config, SimpleNamespace(config_loader=loader), launcher
    sweeper.sweep([LR])
    return launcher.jobs


@pytest.mark.parametrize(("words", "best"), [((), max), (("data=random_matrix", "model=linear", "loss=mse"), min)])
def test_the_direction_is_the_objectives(tmp_path: Path, words: tuple[str, ...], best: Any) -> None:
    jobs, found = searched(tmp_path, "hydra.sweeper.n_trials=3", *words, LR, value=lr)
    assert f"best_value: {best(lr(overrides) for _, overrides in jobs)}" in found
    assert f"best_value: {min(lr(o) for _, o in jobs)}" in searched(
        tmp_path, "hydra.sweeper.n_trials=3", "hydra.sweeper.direction=minimize", *words, LR, value=lr)[1]  # fmt: skip


def test_failed_trials_count_as_failed_and_too_many_end_the_search(tmp_path: Path) -> None:
    refuse = ("hydra.sweeper.n_trials=4", "batch.effective=0,48")
    jobs, _ = searched(tmp_path / "a", *refuse, value=lambda overrides: None if "batch.effective=0" in overrides else 0.5)
    assert len(jobs) == 4 and any("batch.effective=0" in overrides for _, overrides in jobs)
    with pytest.raises(Refusal, match=r"hydra\.sweeper\.max_failure_rate=0: 1 of 1 jobs failed"):
        searched(tmp_path / "b", *refuse, "hydra.sweeper.max_failure_rate=0", value=lambda overrides: None)


def test_what_cannot_be_searched_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="nothing to search over"):
        searched(tmp_path, "seed=3")
    with pytest.raises(Refusal, match=r"hydra\.sweeper\.storage=.*cannot be opened"):
        searched(tmp_path, "hydra.sweeper.storage=nosuch:///x", LR)


MEDIAN = ("hydra.sweeper.pruner.name=median", "hydra.sweeper.pruner.n_startup_trials=1")


def test_a_pruned_job_is_neither_complete_nor_failed(tmp_path: Path) -> None:
    """The jobs see where the study is; what they leave says how they ended."""
    seen: list[Any] = []

    def job(overrides: list[str]) -> float:
        number = len(seen)
        seen.append(json.loads(os.environ[VARIABLE]))
        (tmp_path / "a" / str(number)).mkdir(parents=True)
        state = "pruned" if number == 2 else "completed"
        (tmp_path / "a" / str(number) / "summary.json").write_text(json.dumps({"state": state}))
        return 1.0 if number == 2 else 0.1 * number

    url = f"hydra.sweeper.storage=journal:{tmp_path / 'study.log'}"
    words = (url, "hydra.sweeper.n_trials=4", *MEDIAN, LR)
    _, found = searched(tmp_path / "a", *words, value=job)
    assert "best_job: 3" in found, "the best is what was pruned"
    assert seen[0]["pruner"]["name"] == "median" and VARIABLE not in os.environ
    kept = load_study(seen[0])
    assert [trial.state.name for trial in kept.trials] == ["COMPLETE", "COMPLETE", "PRUNED", "COMPLETE"]
    assert searched(tmp_path / "a", *words, value=job)[0] == [], "the same command adds a trial"


def load_study(told: dict[str, Any]) -> Any:
    import optuna

    return optuna.load_study(study_name=told["study"], storage=study.storage(told["storage"]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_that_promises_nothing_ends_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    import optuna

    monkeypatch.setenv(VARIABLE, "")  # as it was, afterwards
    where = f"journal:{tmp_path / 'study.log'}"
    kept = optuna.create_study(storage=study.storage(where), study_name="s", direction="maximize")
    for _ in range(2):
        trial = kept.ask()
        for step in (2, 4, 6):
            trial.report(0.99 if step > 2 else 0.0, step)
        kept.tell(trial, 0.99)
    assert kept.ask().number == 2
    study.announce(where, "s", {"name": "median", "n_startup_trials": 1})
    words = (*BASE, "data=digits", "epochs=null", "steps=6", "eval_every=2", "log_every=1", "batch.shard=24")
    if ranks == 1:
        train(tmp_path / "2", *words)
    else:
        train_ranks(2, tmp_path / "2", *words)
    done = summary(tmp_path / "2")
    assert (done["state"], done["steps"], done["error"]) == ("pruned", 4, None) and "step 4" in done["reason"]
    assert list(load_study({"study": "s", "storage": where}).trials[2].intermediate_values) == [2, 4]
    assert rows(tmp_path / "2", "eval/accuracy").__len__() == 2 and (tmp_path / "2" / "checkpoints" / "last").exists()
    if ranks == 1:
        monkeypatch.setattr(study.StudyTrial, "worth_going_on", lambda self, result: 1 / 0)
        train(tmp_path / "apart", *words)  # of no search: its folder is no number
        assert summary(tmp_path / "apart")["state"] == "completed"


def test_a_study_out_of_reach_prunes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    trial = object.__new__(study.StudyTrial)
    trial.objective, trial.known, trial.trial = None, set(), None  # type: ignore[assignment]
    assert trial.worth_going_on({"step": 3, "eval/accuracy": 0.5}) and "cannot be reached" in caplog.text


def test_what_cannot_prune_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"hydra\.sweeper\.pruner=.*optuna does not take it"):
        searched(tmp_path, *MEDIAN, "hydra.sweeper.pruner.patience=3", LR)
    with pytest.raises(Exception, match="pruner"):
        searched(tmp_path, "hydra.sweeper.pruner.name=best", LR)


def test_rounds_are_launched_in_runs_of_numbers(tmp_path: Path) -> None:
    assert consecutive([0, 1, 2]) == [(0, 3)] and consecutive([0, 2, 3, 7]) == [(0, 1), (1, 3), (3, 4)]
    jobs, _ = searched(tmp_path, "hydra.sweeper.n_trials=5", "hydra.sweeper.n_jobs=2", LR, value=lr)
    assert [number for number, _ in jobs] == [0, 1, 2, 3, 4]
