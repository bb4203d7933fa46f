"""The ways a run can end other than done, each with its exit code."""

from __future__ import annotations

import signal

LONGEST = 300  # characters of a value that are shown


def printable(text: str) -> str:
    """`text` without what a terminal would obey; names and values may come from anybody's file."""
    return "".join(c for c in text if c.isprintable())


class ConfigError(ValueError):
    """Refused before anything was trained: one line that names the key, the value and a way out. Exit code 2."""

    exit_code = 2

    def __init__(self, key: str, value: object, problem: str, way_out: str):
        self.key, self.value, self.problem, self.way_out = key, value, problem, way_out
        shown = "null" if value is None else " ".join(str(value).split())
        shown = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."
        super().__init__(printable(f"{key}={shown}: {' '.join(problem.split())}; {' '.join(way_out.split())}"))

    def __reduce__(self):  # the default would rebuild it from the message alone; ranks send it to each other
        return type(self), (self.key, self.value, self.problem, self.way_out)


class JobFailed(RuntimeError):
    """Training failed; the text is what a person needs to see. Exit code 1."""

    exit_code = 1


class Stopped(Exception):
    """Ended by a signal after a complete checkpoint. Exit code 128 + signal number."""

    def __init__(self, signum: int):
        self.signum, self.exit_code = signum, 128 + signum
        super().__init__(f"stopped by {signal.Signals(signum).name}")

    def __reduce__(self):
        return type(self), (self.signum,)
