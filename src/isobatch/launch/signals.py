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
        self.requested, self.since = 0, 0.0
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
