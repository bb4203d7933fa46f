"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 in the process that trains: a flag that the loop reads at step boundaries."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# One press can arrive twice (the terminal signals the whole group, and torchrun passes on what it got), so only what
# comes later than this is a second request.
ECHO_S = 1.0


AGAIN_S = 0.5  # until a signal that ended nothing is raised again


class Terminated(SystemExit):
    """A signal at a moment when nobody trains."""


_early: list[int] = []  # the signal that asks for an end and of which nobody has heard so far


def early(signum: int, frame: FrameType | None) -> None:
    """The handler of a process that does not train yet: raised where it stands, until somebody says `heard`.

    What a handler raises is lost where the interpreter calls back (a weak reference, a `__del__`) and where a library takes all
    that is raised for its own trouble; what would follow is a wait of minutes for other ranks.
    """
    _early[:] = [signum]
    signal.signal(signal.SIGALRM, _once_more)
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    raise Terminated(128 + signum)


def _once_more(alarm: int, frame: FrameType | None) -> None:
    if _early:
        early(_early[0], frame)


def heard() -> int:
    """The early signal, 0 for none; it is not raised again."""
    if not _early:
        return 0
    signal.setitimer(signal.ITIMER_REAL, 0)
    return _early.pop()


class StopFlag:
    """Remembers the first request to stop; the second one stops at once.

    The first only sets `requested`, because the step under way, the agreement between ranks and the checkpoint need a
    process that goes on working.
    """

    def __init__(self) -> None:
        self.requested = 0  # signal number, 0 = none
        self.since = 0.0
        self._quiet, self._owner = False, 0

    def asked(self) -> int:
        return self.requested

    @contextmanager
    def installed(self, *, from_terminal: bool = True, quiet: bool = False) -> Iterator[StopFlag]:
        """Handle SIGTERM, SIGINT if `from_terminal`, SIGHUP (the terminal closes) unless it is ignored (nohup), and SIGUSR1
        (SLURM's warning: `--signal=USR1@120`) unless somebody else does, inside the block. Needs the main thread, else does
        nothing.
        """
        self.requested, self.since = heard(), 0.0
        self._quiet, self._owner = quiet, os.getpid()
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        signals = [signal.SIGTERM, signal.SIGINT] if from_terminal else [signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signals.append(signal.SIGUSR1)
        before = {number: signal.signal(number, self._on_signal) for number in signals}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a data worker that was forked off: Ctrl-C is its parent's business
            if signum in (signal.SIGTERM, signal.SIGHUP):
                os._exit(128 + signum)
            return
        now = time.monotonic()
        if not self.requested:
            self.requested, self.since = signum, now
            if not self._quiet:
                again = "; Ctrl-C again stops at once" if signum == signal.SIGINT else ""
                print(f"isobatch: stopping after this step and a checkpoint{again}", file=sys.stderr, flush=True)
        elif self.requested == signal.SIGUSR1:  # a warning is no request to hurry: the scheduler's SIGTERM follows it
            self.requested, self.since = signum, now
        elif now - self.since > ECHO_S:
            raise KeyboardInterrupt


STOP = StopFlag()  # of this process; there is one training process per rank
