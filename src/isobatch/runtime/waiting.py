"""A limit for somebody else's code that runs in the main thread: a dataset, a model."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
TICK_S = 0.2
DEAF_S = 10.0  # for code that hears a signal to come out; a library that waits inside of C never does


class TooLong(KeyboardInterrupt):  # which neither a dataset nor a model takes for its own trouble
    """Raised where the main thread stands when the limit is over, or some time after a stop was asked for."""


def limited(call: Callable[[], T], limit_s: float, stop: Callable[[], int], grace_s: float,
            give_up: Callable[[], None]) -> T:  # fmt: skip
    """`call()`, in this thread: what it finds there (modes, devices, default dtypes) is what it finds later.

    Args:
        stop: the signal that asks for an end, or 0; then `call` has `grace_s` more to end by itself.
        give_up: called in another thread when the main one does not come out. Ends the process.
    Raises:
        TooLong: it has not ended. Whatever `call` raises.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        return call()
    here, over, late = threading.get_ident(), threading.Event(), threading.Event()

    def heard(signum: int, frame: FrameType | None) -> None:
        if late.is_set() and not over.is_set():
            over.set()
            raise TooLong

    def watch() -> None:
        end = monotonic() + limit_s
        while not over.wait(TICK_S):
            now = monotonic()
            if stop():
                end = min(end, now + grace_s)
            if now > end:
                late.set()
                signal.pthread_kill(here, signal.SIGALRM)
            if now > end + DEAF_S:
                return give_up()
        return None

    before: Any = signal.signal(signal.SIGALRM, heard)
    thread = threading.Thread(target=watch, daemon=True, name="limit")
    thread.start()
    try:
        return call()
    finally:
        over.set()
        thread.join()  # before the handler goes: the signal's default is the end of the process
        signal.signal(signal.SIGALRM, before)
