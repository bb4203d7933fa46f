"""What SLURM's queue says of jobs: where it keeps no accounts (sacct), nobody else says that one has been cancelled."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Collection, Sequence

ASK_S = 15.0
GRACE_S = 120.0  # for jobs to save their last checkpoint once they are cancelled


def accounts() -> bool:
    """Whether sacct answers; where it does not, submitit's warnings of it are silenced."""
    if answer(["sacct", "-n", "-X", "--starttime", "now"]) is not None:
        return True
    logging.getLogger("submitit").setLevel(logging.ERROR)
    return False


def queued(ids: Sequence[str]) -> set[str] | None:
    """Which of these jobs wait or run; None = nobody knows."""
    said = answer(["squeue", "-h", "-r", "-o", "%i", "-j", ",".join(sorted({name.split("_")[0] for name in ids}))])
    return None if said is None else set(said.split()) & set(ids)


def answer(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode and "invalid job id" in done.stderr.lower():
        return ""  # it has forgotten them all
    return None if done.returncode else done.stdout


class Queue:
    """Asked now and then; a job is gone when it was missing twice, since its result may come a moment later."""

    def __init__(self) -> None:
        self.asked, self.missing, self.gone = time.monotonic(), set[str](), set[str]()

    def look(self, ids: Collection[str]) -> set[str]:
        """Those of `ids` that are gone."""
        if ids and time.monotonic() - self.asked > ASK_S:
            self.asked = time.monotonic()
            if (there := queued(list(ids))) is not None:
                missing = set(ids) - there
                self.gone |= missing & self.missing
                self.missing = missing
        return self.gone & set(ids)

    @staticmethod
    def wait(ids: Sequence[str]) -> None:
        """Return when none of `ids` runs any more, in bounded time."""
        end = time.monotonic() + GRACE_S
        while ids and queued(ids) and time.monotonic() < end:
            time.sleep(1.0)


def refusal(error: BaseException) -> str:
    """sbatch's own words in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if "error:" in line] or lines or [type(error).__name__]
    return "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in said)[:300]
