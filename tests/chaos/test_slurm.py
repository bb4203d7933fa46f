"""examples/clusters/slurm.sbatch on a real SLURM of one node: tasks are ranks, a warning is a checkpoint and another turn."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

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
        done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    try:
        start("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
              *(f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")))  # fmt: skip
        until((folder / "munge.socket").exists)
        start("slurmctld", "-D", "-c")
        start("slurmd", "-D")
        until(lambda: "idle" in command("sinfo", "-h", "-o", "%T"))
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
