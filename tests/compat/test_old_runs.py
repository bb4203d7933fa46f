"""What earlier releases left on disk is resumed, evaluated, exported and compared, and goes where it would have gone.

The folders below runs/<release> were written by that release (make_runs.py) and are never made anew: a change that they do
not survive is a broken promise, not a test to adjust.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import rewrite, state_of
from harness import rows, summary, train
from safetensors.torch import load_file

from isobatch.errors import ConfigError
from isobatch.report import write_report
from isobatch.run_folder import layout

HERE = Path(__file__).parent
RELEASES = sorted(path.name for path in (HERE / "runs").iterdir())
EXPECTED = {release: json.loads((HERE / "runs" / release / "expected.json").read_text()) for release in RELEASES}
JOBS = [pytest.param(release, job, id=f"{release}-{job}") for release in RELEASES for job in EXPECTED[release]]
# of one step after six others, on another machine's kernels and threads
CLOSE = {"rtol": 1e-3, "atol": 1e-4}
# Under fp16, gradients that are all but zero differ with the kernels, and AdamW makes steps of the learning rate of each: so
# these are close on average, to a tenth of a step. Without their optimizer's state they would be whole steps apart.
HALF = {"ddp": 0.002}


INTEGERS = ("imports=[integers]", "logger=none", "threads=1", "epochs=null", "data=custom", "data.name=integers",
            "data.num_workers=0", "model=linear", "loss=mse", "scheduler=constant", "batch.effective=8")  # fmt: skip


@pytest.fixture(autouse=True)
def _own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


def copied(tmp_path: Path, release: str, job: str) -> Path:
    """The old folder, where a person would find it: nothing may write into the repository."""
    shutil.copytree(HERE / "runs" / release / job, tmp_path / "old")
    return tmp_path / "old"


def typed(run: Path, job: str, *words: str) -> list[str]:
    """What a person types after `python train.py`: the rest the run knows."""
    more = ("imports=[integers]",) if job == "integers" else ()
    plan = ("parallel=single",) if job == "ddp" else ()
    return [*more, *plan, f"resume={run}", *words]


def close(found: dict[str, Any], expected: dict[str, float]) -> None:
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=CLOSE["rtol"], abs=CLOSE["atol"]), key


@pytest.mark.parametrize(("release", "job"), JOBS)
def test_an_old_run_goes_on_to_the_weights_it_would_have_reached(tmp_path: Path, release: str, job: str,
                                                                 caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    run, expected = copied(tmp_path, release, job), EXPECTED[release][job]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "on", *typed(run, job, f"steps={expected['steps']}"))
    assert not [record.message for record in caplog.records if record.name.startswith("isobatch")]
    found = summary(tmp_path / "on")
    assert found["steps"] == expected["steps"] and found["state"] == "completed"
    begun = rows(run, "train/loss")
    assert len(rows(tmp_path / "on", "train/loss")) == expected["steps"] - len(begun), "it went on, and did not start over"
    close(found["final"], expected["resumed"])
    weights = load_file(tmp_path / "on" / "checkpoints" / "last" / "model.safetensors")
    recorded = load_file(HERE / "runs" / release / "expected" / f"{job.replace('/', '-')}.safetensors")
    assert weights.keys() == recorded.keys()
    for name, tensor in recorded.items():
        assert weights[name].dtype == tensor.dtype
        if job not in HALF:
            torch.testing.assert_close(weights[name], tensor, msg=lambda text, name=name: f"{name}: {text}", **CLOSE)
    if job in HALF:
        apart = torch.cat([(weights[name] - tensor).abs().float().reshape(-1) for name, tensor in recorded.items()])
        assert apart.mean() < HALF[job] / 10
    if job == "integers":  # no sum rounds there, so neither the machine nor its libraries can matter
        assert found["weights_sha256"] == expected["weights_sha256"]
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}, "another run's folder is read only"


def test_an_old_run_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    for release in RELEASES:
        run, expected = copied(tmp_path / release, release, "integers"), EXPECTED[release]["integers"]
        train(run, *typed(run, "integers", f"steps={expected['steps']}"))
        assert summary(run)["weights_sha256"] == expected["weights_sha256"]
        assert len(rows(run, "train/loss")) == expected["steps"]


@pytest.mark.parametrize(("release", "job"), JOBS)
def test_an_old_run_is_evaluated_as_it_was(tmp_path: Path, release: str, job: str) -> None:
    run = copied(tmp_path, release, job)
    train(tmp_path / "again", *typed(run, job, "task=evaluate"))
    close(summary(tmp_path / "again")["final"], EXPECTED[release][job]["evaluated"])


@pytest.mark.slow  # torch's exporter takes seconds to import; it gets what the evaluations above have read
@pytest.mark.parametrize(("release", "job"), JOBS)
def test_an_old_run_is_exported(tmp_path: Path, release: str, job: str) -> None:
    run = copied(tmp_path, release, job)
    train(tmp_path / "out", *typed(run, job, "task=export"))
    weights = load_file(tmp_path / "out" / "export" / "model.safetensors")
    best = load_file(run / "checkpoints" / "last" / "model.safetensors")
    assert weights.keys() == best.keys() and all(torch.equal(weights[name], best[name]) for name in best)
    assert all(value < 1e-4 for value in json.loads((tmp_path / "out" / "export" / "export.json").read_text())
               ["largest_difference"].values())  # fmt: skip


@pytest.mark.parametrize("release", RELEASES)
def test_old_runs_are_compared(tmp_path: Path, release: str) -> None:
    shutil.copytree(HERE / "runs" / release, tmp_path / "old")
    found = write_report([tmp_path / "old"], tmp_path / "report")
    assert {run.job for run in found.runs} == set(EXPECTED[release])
    for run in found.runs:
        assert run.completed and run.error is None and run.summary["steps"] > 0
        assert math.isfinite(run.summary["final"]["train/loss"]) and run.config["task"] == "train"
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


def test_a_run_says_in_which_format_it_is_and_a_later_one_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "new", *INTEGERS, "steps=1")
    assert json.loads((tmp_path / "new" / "plan.json").read_text())["format"] == layout.FORMAT
    assert state_of(tmp_path / "new")["format"] == layout.FORMAT
    assert "format" not in state_of(HERE / "runs" / "0.1.0" / "integers"), "the first release had none, and is read"
    for path in (tmp_path / "new" / "checkpoints").iterdir():
        rewrite(path, lambda state: {**state, "format": layout.FORMAT + 1})
    with pytest.raises(ConfigError, match="none of its checkpoints is whole"):
        train(tmp_path / "on", *INTEGERS, "steps=2", f"resume={tmp_path / 'new'}")


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_the_command_goes_on_with_an_old_run_on_its_own_ranks(tmp_path: Path, release: str) -> None:
    run, expected = copied(tmp_path, release, "ddp"), EXPECTED[release]["ddp"]
    words = f"resume={run}", f"steps={expected['steps']}", "hydra.run.dir=on"
    subprocess.run([sys.executable, str(HERE.parents[1] / "train.py"), *words], cwd=tmp_path, check=True, timeout=200,
                   capture_output=True)  # fmt: skip
    found = summary(tmp_path / "on")
    assert len(found["ranks"]) == 2
    close(found["final"], expected["resumed"])
