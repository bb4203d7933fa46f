"""Other processes of this machine, by number."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def started(pid: int) -> str | None:
    """When a process began, in the kernel's ticks: a number that is used again is not the same process.

    None: it is not there (a dead one that nobody has waited for included), or this system does not say.
    """
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    return None
