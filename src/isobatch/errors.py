"""The ways a run can end other than done, each with its exit code."""

from __future__ import annotations

import signal

LONGEST, LONGEST_TEXT = 300, 600  # characters that are shown of a value, and of each text: it may quote anybody's file


def printable(text: str) -> str:
    """`text` without what a terminal would obey; names and values may come from anybody's file."""
    return "".join(c for c in text if c.isprintable())


def short(text: str, most: int = LONGEST_TEXT) -> str:
    """`text` in one line of at most `most` characters and three points."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}..."


def reason(error: BaseException, most: int = 200) -> str:
    """What `error` says, in one line of at most `most` characters; its kind, where it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def kind_and_reason(error: BaseException, most: int = 200) -> str:
    """The kind of `error`, and what it says if it says anything, in one line."""
    text = " ".join(str(error).split())[:most]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class ConfigError(ValueError):
    """Refused before anything was trained: one line that names the key, the value and a way out. Exit code 2."""

    exit_code = 2

    def __init__(self, key: str, value: object, problem: str, way_out: str):
        self.key, self.value, self.problem, self.way_out = key, value, problem, way_out
        shown = "null" if value is None else " ".join(str(value).split())
        super().__init__(printable(f"{key}={short(shown, LONGEST)}: {short(problem)}; {short(way_out)}"))

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
