"""Cores on a machine that others use too: how many are this process's (by affinity, and by the quota of its control group, a
container's CPU limit), how long it had to wait for one, and threads that let go of theirs while they wait.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc/self/cgroup")
TIMES = Path("/proc/self/schedstat")
LEAST_S = 1.0  # of a process: before, what it had to wait says nothing
# OpenMP's threads look this long for the next piece of work before they sleep, GNU's in rounds of a loop, LLVM's in ms. Their
# own defaults (a millisecond and more, 200 ms) burn the cores that the others need to get there.
WAITING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


def numbers() -> list[int]:
    """The cores that the scheduler may run this process on, by number; [] where the system does not say (macOS)."""
    try:
        return sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return []


def usable(root: Path = ROOT, proc: Path = PROC) -> int:
    """The number of cores that this process can keep busy, at least 1."""
    there = len(numbers()) or os.cpu_count() or 1
    quota = quota_cores(root, proc)
    return max(1, there if quota is None else min(there, int(quota)))


def quota_cores(root: Path = ROOT, proc: Path = PROC) -> float | None:
    """Cores' worth of time that the control groups of this process allow it (v1 and v2); None = as much as there is.

    Every group above counts too, so the smallest quota on the way up is the one that holds.
    """
    found = [quota for folder in _groups(root, proc) if (quota := _quota(folder)) is not None]
    return min(found, default=None)


def let_go(environ: MutableMapping[str, str] = os.environ) -> None:
    """Threads of kernels sleep while they have nothing to do. For what is not yet imported; what a person has set, stays."""
    if not {"OMP_WAIT_POLICY", *WAITING} & set(environ):
        environ.update(WAITING)


def waited(times: Path = TIMES) -> float | None:
    """Share of its time that this process has spent waiting for a core, while it could have run; None = not known (yet)."""
    try:
        ran, stood = (int(word) / 1e9 for word in _text(times).split()[:2])
    except ValueError:
        return None
    return stood / (ran + stood) if ran + stood >= LEAST_S else None


def _groups(root: Path, proc: Path) -> list[Path]:
    """Folders of the control groups that may limit this process, its own first."""
    folders: list[Path] = []
    for line in _text(proc).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            tops = [root, root / "unified"]
        elif "cpu" in controllers.split(","):
            tops = [root / "cpu", root / controllers]
        else:
            continue
        inside = Path(path.lstrip("/"))
        if ".." in inside.parts:  # the group lies outside of what this container sees
            inside = Path()
        for top in tops:
            folders += [top / inside, *(top / parent for parent in inside.parents)]
    # in a container the path is often that of the host, and what limits it is mounted at the top
    return list(dict.fromkeys([*folders, root, root / "cpu", root / "cpu,cpuacct"]))


def _quota(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split() or [
        _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip(),
    ]  # fmt: skip
    try:
        quota, period = float(words[0]), float(words[1])
    except (ValueError, IndexError):  # `max`, or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, ValueError):
        return ""
