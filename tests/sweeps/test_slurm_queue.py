"""A cluster's queue: what it does not take, what it has forgotten, and jobs that are waited for."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isobatch.sweeps import slurm_queue


def tools(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_job_that_the_queue_has_forgotten_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without accounts nobody else says so: missing once it may be on its way out, missing twice it is lost."""
    tools(tmp_path, monkeypatch, squeue="echo 7_0; echo 7_2", sacct="echo Slurm accounting storage is disabled >&2; exit 1")
    monkeypatch.setattr(slurm_queue, "ASK_S", -1.0)
    queue, ids = slurm_queue.Queue(), {"7_0", "7_1"}
    assert not slurm_queue.accounts() and slurm_queue.queued(["7_0", "7_1"]) == {"7_0"}
    assert [queue.look(ids) for _ in range(2)] == [set(), {"7_1"}]
    tools(tmp_path, monkeypatch, squeue="echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", sacct="exit 0")
    assert [queue.look(ids) for _ in range(2)] == [{"7_1"}, ids] and slurm_queue.accounts()
    slurm_queue.Queue.wait(["7_0"])
    tools(tmp_path, monkeypatch, squeue="echo cannot connect >&2; exit 1")
    assert slurm_queue.queued(["7_0"]) is None and slurm_queue.Queue().look(ids) == set()


def test_a_lost_job_is_told_and_the_others_are_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    launcher = pytest.importorskip("isobatch.sweeps.submitit_launcher", reason="pip install 'isobatch[slurm]'")

    def job(number: int) -> Any:
        task = SimpleNamespace(done=lambda: False, paths=SimpleNamespace(stderr="7.err"), stderr=lambda: "")
        return launcher.Running(number, [], None, SimpleNamespace(job_id=f"7_{number}", task=lambda _: task))

    running, done = [job(0), job(1)], {}
    launcher.collect(running, done, {"7_1"})
    assert [one.number for one in running] == [0] and list(done) == [1]
    told = capsys.readouterr().err
    assert "job 1 ended without a result (cancelled or killed: the queue does not know it any more); see 7.err" in told


def test_what_the_cluster_refuses_is_one_line_in_its_words() -> None:
    launcher = pytest.importorskip("isobatch.sweeps.submitit_launcher", reason="pip install 'isobatch[slurm]'")
    from submitit.core.utils import FailedJobError

    def refuse(*given: Any) -> None:
        raise FailedJobError("sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: "
                             "Invalid partition name specified")  # fmt: skip

    with pytest.raises(SystemExit) as refused:
        launcher.submitted(SimpleNamespace(map_array=refuse), None, [(0, ["a=1"])])
    assert str(refused.value) == (
        "isobatch: the cluster did not take the jobs: invalid partition specified: nope; Batch job "
        "submission failed: Invalid partition name specified; set what it names in hydra.launcher"
    )
