"""examples/clusters/slurm.sbatch on a real SLURM of one node: tasks are ranks, a warning is a checkpoint and another turn."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel")
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(900),
    pytest.mark.skipif(any(shutil.which(p) is None for p in PROGRAMS) or os.geteuid() != 0,
                       reason="needs root, and slurmctld, slurmd and munged (Debian: slurm-wlm, munge)"),
]  # fmt: skip
CONFIG = """
ClusterName=isobatch
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d.pid
SlurmctldPort={ctld}
SlurmdPort={d}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def until(condition: Callable[[], bool], limit_s: float = 300) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Ports below those that a system gives to whoever asks for any: nobody takes them before the daemons do."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket() as each, suppress(OSError):
            each.bind(("127.0.0.1", port := random.randrange(20000, 32000)))
            ports.append(port)
    return ports


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """A SLURM of this machine alone; gives a function that runs one of its commands and returns what it prints."""
    folder = Path("/run") / f"isobatch-slurm-{os.getpid()}"  # munge wants folders that root alone can write into
    for name in ("", "state", "spool"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    ctld, d = free_ports(2)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname().partition(".")[0], folder=folder, ctld=ctld, d=d))
    environ = {**os.environ, "SLURM_CONF": str(config), "PYTHONPATH": str(ROOT / "src"),
               "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # fmt: skip
    daemons = []
    logs = (tmp_path / "daemons.log").open("w")

    def start(*words: str) -> None:
        daemons.append(subprocess.Popen(words, env=environ, stdout=logs, stderr=logs))

    def command(*words: str) -> str:
        done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        return done.stdout + done.stderr

    try:
        start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
              *(f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")))  # fmt: skip
        until((folder / "munge.socket").exists)
        start("slurmctld", "-D", "-c")
        start("slurmd", "-D")
        until(lambda: "idle" in command("sinfo", "-h", "-o", "%T"))
        command.environ = environ  # type: ignore[attr-defined]
        yield command
    finally:
        command("scancel", "--user=root")
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(60)
        logs.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_warned_job_saves_queues_again_and_goes_on(slurm: Callable[..., str], tmp_path: Path) -> None:
    shutil.copy(ROOT / "train.py", tmp_path)
    words = ("model=mlp", "model.width=8", "logger=none", "threads=1", "data=synthetic", "data.image_size=8", "log_every=50",
             "epochs=null", "steps=100000000", "checkpoint.every=null", "parallel.timeout_s=120")  # fmt: skip
    job = slurm("sbatch", "--parsable", str(ROOT / "examples/clusters/slurm.sbatch"), *words).strip()
    run = tmp_path / "runs" / job

    def logged() -> int:
        return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0

    until(lambda: logged() > 2)
    assert json.loads((run / "plan.json").read_text())["world_size"] == 2, "the tasks are the ranks"
    slurm("scancel", "--signal=USR1", job)  # what --signal=USR1@120 does
    until(lambda: "PENDING" in slurm("squeue", "-h", "-o", "%T"))
    first = json.loads((run / "summary.json").read_text())
    assert first["state"] == "stopped" and first["steps"] > 0
    # a requeued job waits for two minutes, in which its node lets go of the first turn
    until(lambda: f"step {first['steps']}" in (tmp_path / f"slurm-{job}.log").read_text().partition("goes on from")[2])
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


SWEEP = ("-m", "hydra/launcher=slurm", "hydra.launcher.gpus_per_node=0", "hydra.launcher.cpus_per_task=1",
         "hydra.sweep.dir=sweep", "model=mlp", "model.width=8", "logger=none", "threads=1", "data=synthetic",
         "data.image_size=8", "log_every=50", "epochs=null")  # fmt: skip


def trained(slurm: Any, tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    """train.py as a command of the SLURM's user, waited for by the test."""
    command = [sys.executable, str(ROOT / "train.py"), *SWEEP, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=tmp_path, env=slurm.environ, text=True, **pipes)


def state(run: Path) -> str | None:
    with suppress(OSError, ValueError):
        return str(json.loads((run / "summary.json").read_text())["state"])
    return None


def test_a_sweep_is_an_array_and_what_the_cluster_refuses_is_one_line(slurm: Any, tmp_path: Path) -> None:
    """E6: in sbatch's own words; and then a sweep that the cluster takes, to its report."""
    for words, says in ((("hydra.launcher.partition=nope",), "invalid partition specified: nope"),
                        (("hydra.launcher.gpus_per_node=1",), "generic resource")):  # fmt: skip
        refused = trained(slurm, tmp_path, "steps=3", "seed=0,1", *words)
        said = refused.communicate(timeout=300)[0]
        line = next(line for line in said.splitlines() if "did not take the jobs" in line)
        assert says in line.lower() and "Traceback" not in said and refused.returncode not in (0, None), said
        shutil.rmtree(tmp_path / "sweep", ignore_errors=True)
    done = trained(slurm, tmp_path, "steps=3", "seed=0,1")
    said = done.communicate(timeout=600)[0]
    assert done.returncode == 0 and [state(tmp_path / "sweep" / n) for n in "01"] == ["completed"] * 2, said
    assert (tmp_path / "sweep" / "report.html").exists() and said.count("keeps no accounts") == 1


def test_a_cancelled_job_is_noticed_without_accounts_and_ctrl_c_waits_for_checkpoints(slurm: Any, tmp_path: Path) -> None:
    """E4: of a SLURM without accounting. E5: the report comes after the jobs' last checkpoints."""
    waiting = trained(slurm, tmp_path, "steps=100000000", "checkpoint.every=null", "seed=0,1")
    runs = [tmp_path / "sweep" / n for n in "01"]
    until(lambda: all((run / "metrics.jsonl").exists() for run in runs))
    cancelled = next(line.split()[0] for line in slurm("squeue", "-h", "-r", "-o", "%i %T").splitlines() if "_0" in line)
    slurm("scancel", cancelled)
    until(lambda: state(runs[0]) == "stopped")
    until(lambda: f"{cancelled.partition('_')[0]}_1" in slurm("squeue", "-h", "-r", "-o", "%i"))
    time.sleep(30)  # longer than the queue is asked for and twice missing; job 1 is waited for all the same
    assert waiting.poll() is None
    waiting.send_signal(signal.SIGINT)
    said = waiting.communicate(timeout=300)[0]
    assert waiting.returncode == 130 and "job 0 ended" in said and "Traceback" not in said, said
    assert [state(run) for run in runs] == ["stopped"] * 2
    with (tmp_path / "sweep" / "report.csv").open() as table:
        assert [row["state"] for row in csv.DictReader(table)] == ["stopped"] * 2


def test_the_tasks_of_srun_are_the_ranks(slurm: Any, tmp_path: Path) -> None:
    """E1: one run in one folder; one process each is refused."""
    words = ("model=mlp", "logger=none", "threads=1", "data=synthetic", "data.image_size=8", "epochs=null", "steps=4",
             "log_every=1", "hydra.run.dir=run")  # fmt: skip
    said = slurm("srun", "-n", "2", sys.executable, str(ROOT / "train.py"), "parallel=ddp", *words)
    steps = [json.loads(line).get("step") for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert steps.count(2) == 1 and json.loads((tmp_path / "run/plan.json").read_text())["world_size"] == 2, said
    refused = slurm("srun", "-n", "2", sys.executable, str(ROOT / "train.py"), "parallel=single", *words)
    assert "parallel=ddp" in refused and "Traceback" not in refused
