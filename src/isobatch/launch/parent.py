"""A rank that somebody else started ends when that somebody is gone: an agent of torchrun that was killed outright, a lost
step of SLURM. Else it trains on, or waits, while its successor writes into the same folder.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping

POLL_S = 1.0
LINE = "the process that started the ranks is gone (killed?)"
# launchers that outlive their ranks by design; a shell may start ranks by hand and leave
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_last_words: list[Callable[[str], None]] = []


def watched(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this rank's parent is to be watched: one of the launchers, or any that did not mean to let it go (nohup)."""
    return any(name in environ for name in LAUNCHERS) or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def end_with_parent() -> None:
    """From now on this process ends within a second of its parent. By a thread: importing and waiting do not keep it off."""
    parent = os.getppid()
    if parent <= 1 or not watched():
        return
    threading.Thread(target=_wait, args=(parent,), daemon=True, name="parent").start()


def at_the_end(tell: Callable[[str], None]) -> None:
    """Call `tell(line)` before this process ends for want of a parent."""
    _last_words[:] = [tell]


def _wait(parent: int) -> None:
    try:
        handle = os.pidfd_open(parent)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
    except (AttributeError, OSError):
        poll = None  # type: ignore[assignment]
    while os.getppid() == parent:
        if poll is not None:
            poll.poll(int(1000 * POLL_S))
        else:
            time.sleep(POLL_S)
    for tell in _last_words:
        try:
            tell(LINE)
        except Exception:
            pass
    print(f"isobatch: {LINE}", file=sys.stderr, flush=True)
    os._exit(1)
