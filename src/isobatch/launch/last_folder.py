"""What a launch must not forget from one attempt to the next: its run folder.

torchrun's workers end with every restart and its store may be a new one after each (a world of one has none, a node that
joins can become the one that serves it). What stays on a machine is the agent, the workers' parent. So each machine keeps
a small file per living agent, also when the run is complete: a node can join at that very moment. The ranks put together
what their machines remember (torchrun.py).
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from isobatch.runtime.processes import started


def recall() -> dict[str, str]:
    """Parent folder -> run folder, as an earlier attempt under this process's torchrun agent left it; else nothing."""
    file = _file()
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}


def remember(folders: dict[str, str]) -> None:
    """Keep `folders` (parent -> run folder) for the next attempt; does nothing without torchrun."""
    file = _file()
    if file is None or not folders:
        return
    with suppress(OSError):  # then a restart that torchrun's store does not help needs hydra.run.dir
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({**recall(), **folders}), encoding="utf-8")
        os.replace(part, file)
        _forget_the_dead(file.parent)


def _file() -> Path | None:
    run_id, agent = os.environ.get("TORCHELASTIC_RUN_ID"), os.getppid()
    if run_id is None or not hasattr(os, "getuid"):
        return None
    folder = Path(tempfile.gettempdir(), f"isobatch-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        return None  # somebody else's: it must not choose where this run writes
    return folder / f"{agent}-{started(agent)}-{re.sub(r'[^A-Za-z0-9]', '_', run_id)[:60]}.json"


def _forget_the_dead(folder: Path) -> None:
    for file in folder.iterdir():
        pid, _, rest = file.name.partition("-")
        began = rest.partition("-")[0]
        if pid.isdigit() and began.isdigit() and started(int(pid)) != began:
            file.unlink(missing_ok=True)
