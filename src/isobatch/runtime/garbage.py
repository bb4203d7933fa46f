"""Python's search for circular garbage, in this process: off while a program starts, on while it works.

A start makes a million objects and no garbage: searching them is a sixth of its time.
"""

from __future__ import annotations

import gc


def off() -> None:
    """From the start of the program until `on`."""
    gc.disable()


def keep() -> None:
    """What the imports of a start have made stays, and need never be searched. Does nothing from the second job on."""
    if not gc.isenabled():
        gc.freeze()


def on() -> None:
    """The work begins."""
    gc.enable()
