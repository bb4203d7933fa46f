"""A run that W&B's agent has started, and stops: by hyperband (`early_terminate`), or because somebody asks for it.

The agent sends SIGTERM. It counts a process that leaves with a code above 0 as failed, and gives the sweep up after a few of
these in a row; one that dies of the signal itself is stopped, no more. A shell says 143 of both.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable

STARTED = "WANDB_SWEEP_ID"  # what the agent puts into the environment of what it starts


def watched() -> Callable[[int], None]:
    """What is to be told the exit code before the process leaves with it: where an agent has stopped it, it then dies of the
    signal, after all else that is done at exit (so this is called before anybody else asks for that)."""
    if STARTED not in os.environ:
        return lambda code: None
    told: list[int] = []

    def last() -> None:
        if told == [128 + signal.SIGTERM]:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    atexit.register(last)
    return told.append
