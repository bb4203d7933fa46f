"""Launches that lose workers and nodes, and what has to be the same as if they had not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPT = str(HERE / "chaos_train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# 43 updates an epoch, the last of 8 samples; batch norm, dropout and momentum have to survive
RUN = ["logger=none", "data=synthetic", "data.image_size=8", "model=mlp", "model.width=32", "model.norm=true",
       "model.drop_rate=0.2", "reduction=exact", "batch.effective=12",
       "epochs=null", "log_every=1", "threads=1", "checkpoint.every=5", "checkpoint.every_minutes=null"]  # fmt: skip
SAME = ("step", "update", "epoch", "samples", "train/loss", "train/lr", "train/grad_norm", "eval/loss", "eval/accuracy")


def environment(**more: str) -> dict[str, str]:
    paths = [str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", **more}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return env


def undisturbed(cwd: Path, *overrides: str) -> Path:
    """The same training in one process that nobody disturbs; returns its folder."""
    run = cwd / "undisturbed"
    subprocess.run([sys.executable, SCRIPT, *RUN, *overrides, f"hydra.run.dir={run}"], cwd=cwd, env=environment(),
                   check=True, timeout=180, stdout=subprocess.DEVNULL)  # fmt: skip
    return run


class Launch:
    """A torchrun with its output in a file; in a process group of its own, killed at the latest by `end`."""

    def __init__(self, cwd: Path, options: list[str], overrides: list[str], name: str = "log", prefix: tuple[str, ...] = (),
                 step_s: float = 0.05, **environ: str):  # fmt: skip
        self.cwd, self.log = cwd, cwd / f"{name}.txt"
        environ |= {"CHAOS_MARKS": str(cwd), "CHAOS_STEP_S": str(step_s), "CHAOS_SAVE_S": "0.15"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*prefix, *TORCHRUN, *options, SCRIPT, "parallel=ddp", *RUN, *overrides], cwd=cwd, env=environment(**environ),
                start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def workers(self) -> list[int]:
        """Process ids of the ranks that are alive, in rank order."""
        return workers_of(self.process.pid)

    def training(self) -> list[int]:
        """`workers`, once all of them have done a step; else nothing."""
        pids = self.workers()
        return pids if pids and all((self.cwd / f"trains-{pid}").exists() for pid in pids) else []

    def lost(self, pids: list[int]) -> bool:
        """Whether all of `pids` are gone."""
        return not set(pids) & set(self.workers())

    def wait(self, limit_s: float) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s} s:\n{self.tail()}") from None

    def tail(self) -> str:
        return self.log.read_text()[-3000:]

    def kill_all(self) -> None:
        """A node that loses its power: agent and workers at once."""
        for pid in [self.process.pid, *self.workers()]:
            kill(pid)

    def end(self) -> None:
        if self.process.poll() is None:
            self.kill_all()
            self.process.wait()


def workers_of(agent: int) -> list[int]:
    found: dict[int, int] = {}
    for pid in children(agent):
        with contextlib.suppress(OSError, ValueError):
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            rank = next((word[5:] for word in environ if word.startswith(b"RANK=")), b"")
            found[int(rank)] = pid
    return [pid for _, pid in sorted(found.items())]


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def the_run(cwd: Path) -> Path | None:
    """The only run folder under outputs/, when it is there."""
    found = [path.parent for path in cwd.glob("outputs/*/*/config.yaml")]
    assert len(found) <= 1, f"a restart made a run folder of its own: {found}"
    return found[0] if found else None


def rows(run: Path | None) -> list[dict[str, Any]]:
    if run is None or not (run / "metrics.jsonl").exists():
        return []
    lines = (run / "metrics.jsonl").read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def until(condition: Callable[[], Any], limit_s: float, launch: Launch, tick_s: float = 0.1) -> Any:
    """What `condition` returns, once that is true; fails when the launch ends before, or too much time passes."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert launch.process.poll() is None, f"ended early:\n{launch.tail()}"
        assert time.monotonic() < end, f"waited {limit_s} s for {condition}:\n{launch.tail()}"
        time.sleep(tick_s)
    return found


def assert_same_training(run: Path, reference: Path) -> None:
    """The same weights to the bit, and every step and evaluation logged once, with the same numbers."""
    mine, theirs = (json.loads((path / "summary.json").read_text()) for path in (run, reference))
    assert (mine["state"], mine["error"]) == ("completed", None)
    assert mine["weights_sha256"] == theirs["weights_sha256"]
    assert (mine["steps"], mine["updates"], mine["samples"]) == (theirs["steps"], theirs["updates"], theirs["samples"])
    assert [told(row) for row in rows(run)] == [told(row) for row in rows(reference)]
    assert mine["best"] == theirs["best"]


def told(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in SAME if key in row}
