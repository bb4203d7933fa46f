"""How launches end: who is told, what stands in the folder, and that nothing is left running (docs/durability.md, Endings)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import COMMAND, ROOT, TORCHRUN, Started, left_over, run, summary

TWO_RANKS = ["parallel=ddp", "parallel.nproc=2"]
pytestmark = pytest.mark.timeout(200)


def test_own_ranks_outlive_the_terminal_until_their_checkpoint(tmp_path: Path) -> None:
    started = Started([*COMMAND, *TWO_RANKS, "hydra.run.dir=run"], tmp_path, STANDIN="sleep")
    started.wait_for(tmp_path / "run/ready0", tmp_path / "run/ready1")
    os.killpg(started.process.pid, signal.SIGHUP)  # the fork server too, as the kernel does
    ended = started.ended()
    assert ended.code == 128 + signal.SIGHUP and ended.tracebacks() == 0
    assert (tmp_path / "run/saved").exists() and left_over(tmp_path) == []


def test_a_rank_that_leaves_without_a_word_is_named_at_once(tmp_path: Path) -> None:
    ended = run([*COMMAND, *TWO_RANKS, "hydra.run.dir=run"], tmp_path, STANDIN="leave1")
    line = "rank 1 exited with code 0, without a word"
    assert ended.code == 1 and ended.own_lines() == [f"isobatch: {line}"]
    assert summary(tmp_path / "run")["error"] == line and left_over(tmp_path) == []


def test_ranks_end_with_the_agent_that_started_them(tmp_path: Path) -> None:
    started = Started([*TORCHRUN, "parallel=ddp", "hydra.run.dir=run"], tmp_path, STANDIN="sleep")
    started.wait_for(tmp_path / "run/ready0", tmp_path / "run/ready1")
    started.process.send_signal(signal.SIGKILL)
    started.ended()
    end = time.monotonic() + 100
    while left_over(tmp_path) and time.monotonic() < end:
        time.sleep(0.2)
    assert left_over(tmp_path) == []
    assert summary(tmp_path / "run")["state"] == "failed" and "gone" in summary(tmp_path / "run")["error"]


def test_ranks_that_wait_to_meet_end_with_their_parent_too(tmp_path: Path) -> None:
    """From the first second: the other rank never comes."""
    code = ("import os, subprocess, sys, time; env = dict(os.environ, RANK='1', WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', "
            "MASTER_PORT='1')\nprocess = subprocess.Popen(sys.argv[1:], env=env); print(process.pid, flush=True)\n"
            "time.sleep(1000)")  # fmt: skip
    parent = subprocess.Popen([sys.executable, "-c", code, *COMMAND, "parallel=ddp"], cwd=tmp_path, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
                              env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{COMMAND[1].rpartition('/')[0]}",
                                   "STANDIN_WATCHES": str(tmp_path / "watches")})  # fmt: skip
    assert parent.stdout
    pid = int(parent.stdout.readline())
    while not (tmp_path / "watches").exists():  # one whose parent was never there cannot miss it
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + 100
    while Path(f"/proc/{pid}/stat").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2:3]:
        assert time.monotonic() < end, "the rank outlives its parent"
        time.sleep(0.2)


def test_an_interpolation_that_leads_nowhere_is_one_line_and_stands_in_the_folder(tmp_path: Path) -> None:
    ended = run([*COMMAND, "optimizer.lr=${nope}", "hydra.run.dir=run"], tmp_path)
    assert ended.code == 2 and ended.tracebacks() == 0 and len(ended.own_lines()) == 1
    assert summary(tmp_path / "run")["state"] == "failed" and "optimizer.lr=" in summary(tmp_path / "run")["error"]
    ended = run([*COMMAND, "sweep.tolerance=${nope}", "hydra.run.dir=other"], tmp_path)
    assert ended.code == 2 and ended.tracebacks() == 0 and len(ended.own_lines()) == 1 and "nope" in ended.err
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_is_one_line_and_takes_no_other_job_down(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = run([*COMMAND, "hydra.run.dir=file/run"], tmp_path)
    assert ended.code == 2 and ended.tracebacks() == 0
    (line,) = ended.own_lines()
    assert line.startswith("isobatch: hydra.run.dir=file/run: cannot be made or written (Not a directory); set hydra.run.dir ")
    (tmp_path / "sweep2").mkdir()
    (tmp_path / "sweep2/1").touch()
    words = ("accumulation=1,2", "hydra.sweep.dir=sweep2", "hydra.sweep.subdir=${accumulation.steps}")
    ended = run([*COMMAND, "-m", *words], tmp_path)
    assert ended.code == 1 and ended.tracebacks() == 0 and "isobatch: job 0: hydra.run.dir=" in ended.err
    assert summary(tmp_path / "sweep2/2")["state"] == "completed"


def test_several_tasks_of_srun_are_ranks_and_one_process_among_them_is_refused(tmp_path: Path) -> None:
    def task(number: int, *words: str) -> Started:
        return Started([*COMMAND, "hydra.run.dir=run", *words], tmp_path, keep={
            "SLURM_PROCID": str(number), "SLURM_NTASKS": "2", "SLURM_LOCALID": str(number), "SLURM_STEP_ID": "0",
            "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1"})  # fmt: skip

    both = [task(n, "parallel=ddp") for n in (0, 1)]
    assert [started.ended().code for started in both] == [0, 0]
    assert [rank for rank, _, _ in summary(tmp_path / "run")["seen"]] == [0, 1]
    alone = [task(n, "parallel=single", "hydra.run.dir=other") for n in (0, 1)]
    codes = [started.ended() for started in alone]
    assert codes[0].code == 2 and "was started as 2 ranks" in codes[0].err and codes[1].code == 2


def first_of_three(folder: Path, *words: str, **environ: str) -> Started:
    """Port 0: any that is free."""
    return Started([*COMMAND, "parallel=ddp", *words], folder, keep={
        "RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
        **environ)  # fmt: skip


def test_ranks_that_never_arrive_are_named(tmp_path: Path) -> None:
    ended = first_of_three(tmp_path, "parallel.timeout_s=15", "hydra.run.dir=run").ended()
    line = "ranks 1, 2 of 3 did not arrive within 15 s: every node has to start its own"
    assert ended.code == 1 and ended.own_lines() == [f"isobatch: {line}"]
    assert summary(tmp_path / "run")["error"] == line


def test_a_signal_ends_the_wait_for_ranks_whenever_it_comes(tmp_path: Path) -> None:
    waiting = first_of_three(tmp_path, "hydra.run.dir=other")
    waiting.wait_for(tmp_path / "other/.hydra")  # the first thing that stands there, long before the wait
    waiting.process.terminate()
    assert waiting.ended().code == 143 and summary(tmp_path / "other")["state"] == "stopped"


def test_a_signal_that_the_interpreter_loses_is_raised_again(tmp_path: Path) -> None:
    """As in the callback of a weak reference: what is raised there is printed, and forgotten."""
    waiting = first_of_three(tmp_path, "hydra.run.dir=other", STANDIN_EARLY="15 isobatch.launch.torchrun:run_led",
                             STANDIN_LOST="1").ended()  # fmt: skip
    assert "Exception ignored" in waiting.err, "it was not lost"
    assert waiting.code == 143 and summary(tmp_path / "other")["state"] == "stopped"


def test_a_stop_between_two_steps_of_a_start_stands_in_the_folder_but_not_over_what_is_complete(tmp_path: Path) -> None:
    early = {"STANDIN_EARLY": "15 isobatch.hydra_patches:left_out"}
    stopped = run([*COMMAND, "hydra.run.dir=run"], tmp_path, **early)
    assert stopped.code == 143 and summary(tmp_path / "run")["error"] == "stopped before training began"
    assert run([*COMMAND, "hydra.run.dir=run"], tmp_path).code == 0
    assert run([*COMMAND, "hydra.run.dir=run"], tmp_path, **early).code == 143
    assert summary(tmp_path / "run")["state"] == "completed"
