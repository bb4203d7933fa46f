"""A tiny process that outlives a training process killed outright, only to write down that it was.

Nothing inside a process survives SIGKILL (and torchrun kills the healthy ranks of a launch that lost one), yet a run
folder without a summary looks like a run that never was. Runs as a script: standard library only, no site packages, so
that it costs some ten milliseconds.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

POLL_S = 0.5


@contextmanager
def witnessed(run_dir: Path, line: str = "the training process was killed") -> Iterator[None]:
    """If this process dies inside the block, run_dir/summary.json and train.log get `line` a moment later."""
    from isobatch.launch.outcome import BLANK
    from isobatch.run_folder import layout  # not above: the script that this file is as well has no packages

    blank = json.dumps({**BLANK, "state": "failed", "error": line})
    witness = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(run_dir / layout.SUMMARY),
         str(run_dir / layout.LOG), blank, str(_modified(str(run_dir / layout.SUMMARY)))],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        with suppress(OSError):
            witness.communicate(b"done")


def _modified(path: str) -> int:
    return os.stat(path).st_mtime_ns if os.path.exists(path) else 0


def watch(parent: int, summary: str, log_file: str, blank: str, before: str) -> None:
    """Wait for "done" or for the end of `parent`; in the second case write what `parent` did not since `before`, when it was
    to be watched: on a busy machine it may have told its end, and be gone, when this process gets to its first line."""
    while os.getppid() == parent:
        if select.select([0], [], [], POLL_S)[0] and os.read(0, 16):
            return
        # end of file without a word can also mean that only the pipe was closed: the parent's own end decides
    if _modified(summary) == int(before):
        with open(summary, "w", encoding="utf-8") as file:
            file.write(json.dumps(json.loads(blank), indent=2) + "\n")
        with open(log_file, "a", encoding="utf-8") as log:
            log.write(f"isobatch: {json.loads(blank)['error']}\n")


if __name__ == "__main__":
    watch(int(sys.argv[1]), *sys.argv[2:])
