"""Standard output and error that may be closed, full or gone: what cannot be printed is dropped, and nothing ends over it."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import Any

log = logging.getLogger("isobatch")


def to_stderr(text: str) -> None:
    """A line to the person, after whatever the job printed."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


class Patient:
    """A text stream that never raises. From the first failure on its file is /dev/null: for C code and the interpreter's last
    flush too."""

    def __init__(self, stream: Any, name: str):
        self._stream, self._name, self._lost = stream, name, False

    def write(self, text: str) -> int:
        if not self._lost:
            try:
                self._stream.write(text)
            except (OSError, ValueError) as error:
                self._lose(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not self._lost:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def _lose(self, error: Exception) -> None:
        self._lost = True
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        problem = getattr(error, "strerror", None) or str(error)
        log.warning("%s cannot be written (%s): nothing more is printed there", self._name, problem)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def install() -> None:
    """Make sys.stdout and sys.stderr patient; does nothing the second time.

    A descriptor of the three that is closed is opened on /dev/null first: the next file that is opened, a checkpoint's say,
    would get its number, and with it whatever a library prints.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):
                os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)  # takes the lowest number that is free
                os.set_inheritable(number, True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, for as long as the process lives
        if not isinstance(stream, Patient):
            setattr(sys, name, Patient(stream, "standard output" if number == 1 else "standard error"))
