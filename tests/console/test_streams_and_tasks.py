"""What can be printed on, who started this process, and what of a rank's ending is the cause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import BASE, summary, train
from torch.optim import optimizer

from isobatch.cli.command import without_local_rank
from isobatch.console.streams import Patient
from isobatch.errors import ConfigError, JobFailed
from isobatch.launch.outcome import Outcome, RunFolder, cause
from isobatch.launch.schedulers import first_node, join
from isobatch.planner.hooks import without_global_hooks
from isobatch.run_folder.files import write_json


class Full:
    """A stream of a full disk, or of a pipe that nobody reads."""

    def __init__(self, error: Exception):
        self.error, self.calls = error, 0

    def write(self, text: str) -> int:
        self.calls += 1
        raise self.error

    flush = write

    def fileno(self) -> int:
        raise OSError("none")


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(32, "Broken pipe"),
        OSError(28, "No space left on device"),
        OSError(5, "Input/output error"),
        ValueError("I/O operation on closed file"),
    ],
    ids=str,
)
def test_what_cannot_be_printed_is_dropped_after_one_word(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    stream = Full(error)
    patient: Any = Patient(stream, "standard output")
    for _ in range(3):
        print("x", file=patient, flush=True)
    assert stream.calls == 1
    (record,) = caplog.records
    assert record.getMessage().startswith("standard output cannot be written (")


@pytest.mark.parametrize("redirect", [">&- 2>&-", "<&- >&- 2>&-", "> /dev/full 2>&1", "| head -c 1 > /dev/null"])
def test_closed_and_full_streams_end_nothing(tmp_path: Path, redirect: str) -> None:
    """Also what is printed past Python goes nowhere, not into the next file that is opened."""
    code = ("import os, sys; from isobatch.console import streams; streams.install()\n"
            "file = open('file', 'w')\n"
            "for i in range(20000): print('x' * 100)\n"
            "os.write(1, b'past Python'); os.write(2, b'past Python'); sys.stdout.flush(); file.close()\n"
            "open('done', 'w').close()")  # fmt: skip
    (tmp_path / "code.py").write_text(code)
    done = subprocess.run(f"{sys.executable} code.py {redirect}; echo ${{PIPESTATUS[0]}} > code", shell=True, cwd=tmp_path,
                          executable="/bin/bash", timeout=100)  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "done").exists()
    assert (tmp_path / "code").read_text() == "0\n" and (tmp_path / "file").read_text() == ""


def test_help_into_head_is_no_news() -> None:
    program = Path(__file__).parents[2] / "train.py"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, program, "--help"], stdout=full, stderr=subprocess.PIPE, timeout=200)
    assert (done.returncode, done.stderr) == (0, b"")


SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4(x2)", "SLURM_NNODES": "2",
         "SLURM_JOB_NODELIST": "gpu[03-05,7],login", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}  # fmt: skip


def test_tasks_of_srun_are_ranks() -> None:
    environ = dict(SLURM)
    join(environ)
    assert {k: environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")} == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu03"}  # fmt: skip
    port, other = environ["MASTER_PORT"], {**SLURM, "SLURM_PROCID": "0"}
    join(other)
    assert other["MASTER_PORT"] == port and 20000 <= int(port) < 32000, "below what connections are given"
    alone = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
    join(alone)
    assert (alone["RANK"], alone["LOCAL_WORLD_SIZE"], alone["MASTER_ADDR"]) == ("1", "2", "127.0.0.1")


@pytest.mark.parametrize("environ", [
    {}, {**SLURM, "SLURM_NTASKS": "1"}, {**SLURM, "RANK": "0", "WORLD_SIZE": "1"},
    {k: v for k, v in {**SLURM, "SLURM_PROCID": "0"}.items() if k != "SLURM_STEP_ID"},  # the batch script itself
    {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, {"PMI_RANK": "x", "PMI_SIZE": "2"},
])  # fmt: skip
def test_what_is_no_task_of_several_stays_alone(environ: dict[str, str]) -> None:
    before = dict(environ)
    join(environ)
    assert environ == before


def test_tasks_of_mpirun_are_ranks() -> None:
    for names in (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
                  ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")):  # fmt: skip
        environ = dict(zip(names, ("1", "2", "1", "2"), strict=True))
        join(environ)
        assert (environ["RANK"], environ["WORLD_SIZE"], environ["MASTER_ADDR"]) == ("1", "2", "127.0.0.1")
        with pytest.raises(ConfigError, match="MASTER_ADDR=null: 4 tasks on several nodes"):
            join(dict(zip(names, ("1", "4", "1", "2"), strict=True)))


def test_the_first_node_of_a_list() -> None:
    lists = {"a": "a", "a,b": "a", "n[1-3]": "n1", "n[07,9]": "n07", "n[1-2]-ib": "n1-ib", "x,n[1-2]": "x", "n1[2-3],z": "n12"}
    assert {text: first_node(text) for text in lists} == lists


def test_torch_distributed_launch_hands_over_a_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert without_local_rank(["--local-rank=1", "--local_rank=1", "seed=1", "--local-rank=0"]) == ["seed=1", "--local-rank=0"]


def test_what_user_code_sets_in_the_environment_makes_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobatch.runtime.distributed import Ranks, joined, ranks_from_environment

    assert ranks_from_environment() == Ranks() and not joined()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks_from_environment() == Ranks() and not joined()


def test_a_lost_connection_is_never_the_cause() -> None:
    lost = Outcome("failed", line="RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1", rank=0, at=1.0)
    for own in (Outcome("stopped", line="stopped by SIGINT", signum=2, rank=1, at=2.0), Outcome("refused", rank=1, at=2.0),
                Outcome("failed", line="rank 1: data: sample 3 could not be read", rank=1, at=2.0)):  # fmt: skip
        assert cause([lost, own]) is own
    assert cause([lost, Outcome("done", 1.0)]) is lost


@pytest.mark.parametrize(("outcome", "state"), [
    (Outcome("stopped", line="stopped by SIGINT", signum=2, rank=1), "stopped"),
    (Outcome("refused", line="a=1: b; c"), "failed"), (Outcome("failed", line="rank 1: x", rank=1), "failed"),
])  # fmt: skip
def test_the_summary_says_what_the_launcher_found_out(tmp_path: Path, outcome: Outcome, state: str) -> None:
    folder = RunFolder(tmp_path)
    write_json(tmp_path / "summary.json", {"state": "failed", "steps": 7, "error": "Connection closed by peer"})
    folder.settle(outcome)
    assert summary(tmp_path) == {"state": state, "steps": 7, "error": outcome.line}


class Strange(torch.utils.data.Dataset):
    """Ends the worker that reads sample 5, or raises what no dataset should."""

    def __init__(self, how: str):
        self.how = how

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 5:
            if self.how == "kill":
                os.kill(os.getpid(), 9)
            if self.how == "exit":
                os._exit(3)
            raise {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}[self.how]
        return torch.zeros(4), index % 2


def read_all(how: str, workers: int) -> None:
    from isobatch.data import DataInfo, Split
    from isobatch.data.device import ToDevice
    from isobatch.data.feed import Request
    from isobatch.data.loader import WorkerSource
    from isobatch.data.samples import Samples

    split = Split(Strange(how), None)  # type: ignore[arg-type]
    source = WorkerSource(Samples(split, 0, False), ToDevice(torch.device("cpu"), DataInfo("x", (4,)), False), workers)
    try:
        list(source.batches(Request(0, torch.arange(i, i + 2)) for i in range(0, 12, 2)))
    finally:
        source.close()


@pytest.mark.parametrize(("how", "workers", "says"), [
    ("kill", 1, r"a worker process died \(process \d+ was killed by SIGKILL\); if memory ran out"),
    ("exit", 1, r"a worker process died \(process \d+ exited with code 3\)"),
    ("SystemExit", 0, "could not be read: SystemExit"),
    ("KeyboardInterrupt", 1, "could not be read: KeyboardInterrupt"), ("SystemExit", 1, "could not be read: SystemExit"),
])  # fmt: skip
def test_a_worker_that_is_lost_is_one_line(how: str, workers: int, says: str) -> None:
    with pytest.raises(JobFailed, match=says) as failed:
        read_all(how, workers)
    assert "\n" not in str(failed.value)


def test_no_hook_of_the_users_runs_in_a_preview(tmp_path: Path) -> None:
    steps: list[Any] = []
    handle = optimizer.register_optimizer_step_post_hook(lambda *_: steps.append(1))
    forward = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        train(tmp_path / "run", *BASE, "epochs=null", "steps=2")
        assert len(steps) == 2, "the preview of the memory counted as a step"
        with without_global_hooks():
            assert not torch.nn.modules.module._global_forward_hooks
        assert torch.nn.modules.module._global_forward_hooks
    finally:
        handle.remove()
        forward.remove()
