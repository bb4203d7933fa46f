"""The launcher with real processes, and a run_job that does what the test asks (standin.py)."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from launching import COMMAND, TORCHRUN, Started, left_over, run, summary

TWO_RANKS = ["parallel=ddp", "parallel.nproc=2"]
pytestmark = pytest.mark.timeout(150)


def test_a_sweep_in_one_process_runs_every_job_and_tells_each_failure_once(tmp_path: Path) -> None:
    ended = run([*COMMAND, "-m", "accumulation=1,0,3,x,1.5,6", "hydra.sweep.dir=sweep"], tmp_path,
                STANDIN="fail0", STANDIN_AT="3")  # fmt: skip
    jobs = [summary(tmp_path / "sweep" / str(n)) for n in range(6)]
    assert ended.code == 1
    assert [job["state"] for job in jobs] == ["completed", "failed", "failed", "failed", "failed", "completed"]
    assert [job["steps"] for job in jobs] == [1, None, 0, None, None, 6]
    for n, value in ((1, "0"), (3, "x"), (4, "1.5")):
        line = f"accumulation.steps={value}: is not a positive integer; set accumulation=3 or accumulation=auto"
        assert jobs[n]["error"] == line
        assert f"isobatch: {line}" in (tmp_path / "sweep" / str(n) / "train.log").read_text()
        assert ended.own_lines().count(f"isobatch: {line}") == 1
    log = (tmp_path / "sweep/2/train.log").read_text()
    assert log.count("Traceback") == 1
    assert "asked to fail on rank 0" in log
    assert ended.tracebacks() == 0
    assert "accumulation=0" not in (tmp_path / "sweep/0/train.log").read_text()
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_a_sweep_on_own_ranks_goes_on_after_one_rank_failed(tmp_path: Path) -> None:
    typed_in = tmp_path / "typed_in"
    for file in ("train/cat/a.jpg", "train/dog/b.jpg", "val/cat/c.jpg", "val/dog/d.jpg"):  # only their names are read
        (typed_in / "photos" / file).parent.mkdir(parents=True)
        (typed_in / "photos" / file).touch()
    ended = run(
        [*COMMAND, "-m", *TWO_RANKS, "accumulation=range(1,4)", "hydra.job.chdir=true", "data=image_folder",
         "data.root=./photos"], typed_in, STANDIN="fail1", STANDIN_AT="2",
    )  # fmt: skip
    (sweep,) = typed_in.glob("multirun/*/*")
    jobs = [summary(sweep / str(n)) for n in range(3)]
    assert ended.code == 1
    assert [job["state"] for job in jobs] == ["completed", "failed", "completed"]
    assert jobs[1]["error"] == "rank 1: RuntimeError: asked to fail on rank 1"
    assert jobs[0]["data_root"] == str(typed_in / "photos")
    assert jobs[0]["cwd"] == str(sweep / "0")
    assert len({pid for job in (jobs[0], jobs[2]) for _, pid, _ in job["seen"]}) == 4
    assert (sweep / "1/train.log").read_text().count("Traceback") == 1
    assert "[rank 1] - a warning of rank 1" in (sweep / "0/train.log").read_text()
    assert sorted(path.name for path in typed_in.iterdir()) == ["multirun", "photos"]
    assert left_over(typed_in) == []


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    ended = run([*COMMAND, *TWO_RANKS, "hydra.run.dir=run"], tmp_path, STANDIN="kill1")
    assert ended.code == 1
    assert ended.own_lines() == ["isobatch: rank 1 was killed by SIGKILL (out of memory?)"]
    assert summary(tmp_path / "run")["error"] == "rank 1 was killed by SIGKILL (out of memory?)"
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_a_rank_that_waits_for_nothing_is_taken_down_with_the_one_that_failed(tmp_path: Path) -> None:
    ended = run([*COMMAND, *TWO_RANKS, "hydra.run.dir=run"], tmp_path, STANDIN="hang1")
    assert ended.code == 1
    assert ended.tracebacks() == 1
    assert summary(tmp_path / "run")["error"] == "rank 1: RuntimeError: rank 1 leaves"
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(("start", "rank"), [
    ("own ranks", 0), *(pytest.param(*c, marks=pytest.mark.slow) for c in (("own ranks", 1), ("torchrun", 0), ("torchrun", 1))),
])  # fmt: skip
def test_a_rank_that_hangs_is_ended_by_the_time_limit_and_named(tmp_path: Path, start: str, rank: int) -> None:
    command = [*COMMAND, *TWO_RANKS] if start == "own ranks" else [*TORCHRUN, "parallel=ddp"]
    ended = run([*command, "parallel.timeout_s=8", "hydra.run.dir=run"], tmp_path, STANDIN=f"stuck{rank}")
    line = f"rank {rank} hung: the others waited parallel.timeout_s=8 s for a collective"
    assert ended.code == 1
    assert ended.own_lines() == [f"isobatch: {line}"]
    assert summary(tmp_path / "run")["error"] == line
    assert left_over(tmp_path) == []


@contextmanager
def torchruns_port_taken() -> Iterator[None]:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # a torchrun that runs beside this test has it: taken is taken
            taken.bind(("", 29500))
            taken.listen()
        yield


@pytest.mark.slow
@pytest.mark.case(35)
def test_two_torchruns_at_once_beside_a_taken_port_do_not_meet(tmp_path: Path) -> None:
    with torchruns_port_taken():
        both = [Started([*TORCHRUN, "parallel=ddp", f"accumulation={n}"], tmp_path) for n in (2, 3)]
        assert [started.ended().code for started in both] == [0, 0]
    jobs = [summary(path.parent) for path in tmp_path.glob("outputs/*/*/summary.json")]
    assert sorted(job["steps"] for job in jobs) == [2, 3]
    assert len({pid for job in jobs for _, pid, _ in job["seen"]}) == 4


def test_more_ranks_than_a_machine_can_run_are_refused(tmp_path: Path) -> None:
    ended = run([*COMMAND, "parallel=ddp", "parallel.nproc=100000"], tmp_path)
    assert ended.code == 2
    assert ended.own_lines()[0].startswith("isobatch: parallel.nproc=100000: is more than a run starts itself")


@pytest.mark.case(35)
def test_a_taken_port_that_was_asked_for_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ended = Started([*COMMAND, "parallel=ddp", "hydra.run.dir=run"], tmp_path, keep={
            "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).ended()  # fmt: skip
    assert ended.code == 2
    assert ended.own_lines() == [f"isobatch: MASTER_PORT={port}: port {port} is in use on this machine; "
                                 "set another port, or let torchrun choose one"]  # fmt: skip


def test_own_ranks_stop_after_a_checkpoint_and_so_does_the_sweep(tmp_path: Path) -> None:
    started = Started([*COMMAND, "-m", *TWO_RANKS, "accumulation=1,2", "hydra.sweep.dir=sweep"], tmp_path,
                      STANDIN="sleep", STANDIN_SAVE_S="1.5")  # fmt: skip
    started.wait_for(tmp_path / "sweep/0/ready0", tmp_path / "sweep/0/ready1")
    started.press_ctrl_c()
    ended = started.ended()
    assert ended.code == 130
    assert ended.tracebacks() == 0
    assert (tmp_path / "sweep/0/saved").exists()
    assert summary(tmp_path / "sweep/0")["state"] == "stopped"
    assert not (tmp_path / "sweep/1").exists()
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("options", [[], TWO_RANKS], ids=["one process", "own ranks"])
def test_sigkill_leaves_a_summary_and_no_process(tmp_path: Path, options: list[str]) -> None:
    started = Started([*COMMAND, *options, "hydra.run.dir=run"], tmp_path, STANDIN="sleep")
    started.wait_for(tmp_path / "run/ready0")
    started.process.send_signal(signal.SIGKILL)
    started.ended()
    assert left_over(tmp_path) == []
    assert summary(tmp_path / "run")["state"] == "failed"
    assert "was killed" in summary(tmp_path / "run")["error"]


@pytest.mark.slow
def test_torchrun_sweeps_in_step_and_needs_no_fixed_port(tmp_path: Path) -> None:
    with torchruns_port_taken():
        ended = run([*TORCHRUN, "-m", "parallel=ddp", "accumulation=1,2,3"], tmp_path, STANDIN="fail1", STANDIN_AT="2")
    (sweep,) = tmp_path.glob("multirun/*/*")
    jobs = [summary(sweep / str(n)) for n in range(3)]
    assert ended.code == 1
    assert [job["state"] for job in jobs] == ["completed", "failed", "completed"]
    assert [len(job.get("seen", [])) for job in jobs] == [2, 0, 2]
    assert all(job["told"] == [job["told"][0]] * 2 for job in (jobs[0], jobs[2])), "one folder and one config (case 1)"
    assert jobs[1]["error"] == "rank 1: RuntimeError: asked to fail on rank 1"
    assert left_over(tmp_path) == []


def test_torchrun_stops_after_a_checkpoint(tmp_path: Path) -> None:
    started = Started([*TORCHRUN, "parallel=ddp", "hydra.run.dir=run"], tmp_path, STANDIN="sleep")
    started.wait_for(tmp_path / "run/ready0", tmp_path / "run/ready1")
    started.process.terminate()
    started.ended()
    assert (tmp_path / "run/saved").exists()
    assert summary(tmp_path / "run")["state"] == "stopped"
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_torchrun_with_one_process_settings_is_refused_in_one_line(tmp_path: Path) -> None:
    ended = run([*TORCHRUN, "parallel=single", "hydra.run.dir=run"], tmp_path)
    assert ended.code == 1  # torchrun's own; rank 0's was 2
    assert len(ended.own_lines()) == 1
    assert "parallel.name=single: was started as 2 ranks" in ended.err
    assert "exitcode  : 2" in ended.err
