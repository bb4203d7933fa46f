"""What W&B's agent sees of a run that it has stopped: a process that died of its signal, not one that failed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from isobatch.cli import agent

PROGRAM = """
import atexit, runpy, sys
watched = runpy.run_path(sys.argv[1])["watched"]
leaves = watched()
atexit.register(print, "all else is done", flush=True)
leaves(int(sys.argv[2]))
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("environment", "code", "seen"),
    [({agent.STARTED: "sweep"}, 143, -signal.SIGTERM), ({agent.STARTED: "sweep"}, 2, 2), ({agent.STARTED: "sweep"}, 0, 0),
     ({}, 143, 143)],
)  # fmt: skip
def test_a_stopped_run_dies_of_the_signal(environment: dict[str, str], code: int, seen: int) -> None:
    command = [sys.executable, "-S", "-c", PROGRAM, str(Path(agent.__file__)), str(code)]
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert (found.returncode, found.stdout) == (seen, "all else is done\n")
