"""Start commands as a user does, with standin.py in place of training, and see what they leave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMMAND = [sys.executable, str(HERE / "standin_train.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(HERE / "standin_train.py")]
LIMIT_S = 200


@dataclass
class Ended:
    code: int
    out: str
    err: str
    seconds: float

    def tracebacks(self) -> int:
        return self.err.count("Traceback (most recent call last)")

    def own_lines(self) -> list[str]:
        """Where a machine's name leads nowhere torch warns of it, and ends that line later: ours may stand on the same one."""
        return re.findall(r"(?:^|err=-\d)(isobatch: .*)", self.err, re.MULTILINE)


class Started:
    """A running command in a process group of its own, like a shell's foreground job."""

    def __init__(self, command: list[str], cwd: Path, keep: dict[str, str] | None = None, **environ: str):
        paths = [str(ROOT / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1", **environ}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HYDRA_FULL_ERROR"):
            env.pop(name, None)
        env |= keep or {}  # a launcher's own variables, for a test that plays the launcher
        self.began = time.monotonic()
        self.process = warm.Popen(
            command, cwd=cwd, env=env, text=True, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def wait_for(self, *files: Path) -> None:
        while not all(file.exists() for file in files):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() - self.began < LIMIT_S, f"no {files}"
            time.sleep(0.05)

    def press_ctrl_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def ended(self) -> Ended:
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        return Ended(self.process.returncode, out, err, time.monotonic() - self.began)


def run(command: list[str], cwd: Path, **environ: str) -> Ended:
    return Started(command, cwd, **environ).ended()


def summary(run_dir: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return data


def left_over(cwd: Path) -> list[str]:
    """Command lines of the processes that work in `cwd` or below, after the second that a dying one may take."""
    for _ in range(40):
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or int(entry.name) == os.getpid():
                    continue
                if Path(os.readlink(entry / "cwd")).is_relative_to(cwd):
                    found.append((entry / "cmdline").read_text().replace("\0", " ")[:200])
            except OSError:
                continue
        if not found:
            break
        time.sleep(0.05)
    return found
