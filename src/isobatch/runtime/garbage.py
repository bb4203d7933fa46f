"""Python's search for circular garbage, in this process: off while a program starts, on while it works.

A start makes a million objects and no garbage: searching them is a sixth of its time.
"""

from __future__ import annotations

import gc
from itertools import count

AT_ONCE = 32  # configs, of about 2 MB each
_composed = count(1)


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


def composed() -> None:
    """One more config was: a ring of nodes that know each other. Of a large sweep's many are let go while the search is off."""
    if not gc.isenabled() and next(_composed) % AT_ONCE == 0:
        gc.collect()
        gc.freeze()  # what is left is no config but one: the next search need not look at it
