"""How busy the machines of a run are, as its rows say: a logger sees the main rank's alone."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from isobatch.runtime.distributed import Ranks

Load = dict[str, float]


def here(ranks: Ranks, proc: Path = Path("/proc/meminfo")) -> Load | None:
    """Of this machine, by one of its ranks (None by the others): `load`, processes that run or wait for a core, a mean over the
    last minute; `memory_used_mb`, by everybody."""
    if ranks.local_rank:
        return None
    found = {"load": os.getloadavg()[0]}
    try:
        amounts = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", proc.read_text(encoding="ascii"), re.MULTILINE))
        found["memory_used_mb"] = (int(amounts["MemTotal"]) - int(amounts["MemAvailable"])) // 1024
    except (OSError, ValueError, KeyError):  # there is no such file: another system
        pass
    return found


def rows(loads: Sequence[Load | None]) -> Load:
    """`node0/load`, ... of all machines in the order of their ranks; none of one alone, which the logger sees itself."""
    machines = [load for load in loads if load is not None]
    if len(machines) < 2:
        return {}
    return {f"node{k}/{key}": value for k, load in enumerate(machines) for key, value in load.items()}
