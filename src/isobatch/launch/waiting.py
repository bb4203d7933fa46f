"""Waiting for other ranks at the start: for how long, and with an ear for signals."""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

ARRIVE_S = 600.0  # for ranks to start, and for rank 0 to compose the next job
SOONEST_S = 15.0  # no less, whatever is typed: ranks import for seconds before they can say anything
TICK_S = 0.05


@functools.cache
def arrive_s() -> float:
    """How long ranks wait for each other at the start: `parallel.timeout_s` where it is typed (the config is not there yet)."""
    typed = re.findall(r"[ ]\+{0,2}parallel\.timeout_s=([0-9]+(?:\.[0-9]*)?)(?= )", f" {' '.join(sys.argv[1:])} ")
    return max(SOONEST_S, float(typed[-1])) if typed else ARRIVE_S


def attended(call: Callable[[], Any]) -> Any:
    """`call()`, which may wait inside of torch, while signals are still heard here."""
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(TICK_S)
    if failed:
        raise failed[0]
    return found[0]
