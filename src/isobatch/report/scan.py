"""The pass over metrics.jsonl itself: every step and loss, where each row lies, and the evaluations whole.

A sweep of 500 jobs with 10,000 logged steps is 1.3 GB of text, and `json.loads` alone would take half a minute over
it. So a block of lines is searched for its steps and losses by two patterns, at a fifth of that cost; the few blocks
that hold anything unusual are read line by line.
"""

from __future__ import annotations

import itertools
import re
import sys
from array import array
from typing import BinaryIO

import numpy as np

from isobatch.run_folder.reading import KEY, SIZE
from isobatch.run_folder.rows import parsed

_LOSS, _STEP = re.compile(rb'"train/loss": ?([^,}]+)'), re.compile(rb'"step": ?(\d+)')
_EVAL, _TRAIN, _BLOCK = b'"eval/', b'"train/loss":', 1 << 17
MOST = 64  # numbers of a row
EVALS = 200_000  # numbers of all evaluations, and one more for every 16 bytes of the file
BEFORE = "_train_row"  # key of an evaluation: where the train row before it lies, for samples and seconds


def number(value: object) -> float:
    """`value` as a float; NaN for anything that is not a number (null, text, a missing key)."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # JSON allows integers of any length
            return float("nan")
    return float("nan")


def parse(line: bytes) -> dict[str, object]:
    """The numbers of the row on this line; {} for a line that a killed writer left half-written."""
    row = parsed(line) or {}
    numbers: dict[str, object] = {
        sys.intern(key): value for key, value in row.items() if isinstance(value, int | float) and len(key) <= KEY
    }
    return numbers if len(numbers) <= MOST else dict(itertools.islice(numbers.items(), MOST))


class Scan:
    """The arrays that one pass fills, one entry per train row, in rising order of steps.

    A resumed run logs some steps again: the later row replaces the earlier, and evaluations after it go as well.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.steps, self.losses, self.offsets = array("q"), array("d"), array("q")
        self.evals: list[dict[str, object]] = []
        self.room = EVALS
        at, rest, whole = 0, b"", True
        while block := file.read(_BLOCK):
            self.room += len(block) // 16
            if not whole:  # within a line that is longer than any row
                cut = block.find(b"\n") + 1 or len(block)
                whole = block[:cut].endswith(b"\n")
                at, block = at + cut, block[cut:]
            block = rest + block
            cut = block.rfind(b"\n") + 1
            block, rest = block[:cut], block[cut:]
            self._add(block, at)
            at += cut
            if len(rest) > SIZE:
                at, rest, whole = at + len(rest), b"", False
        if rest:
            self._add_lines(rest, at)

    def _add(self, block: bytes, at: int) -> None:
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10)
        starts = np.concatenate([[0], ends[:-1] + 1])
        evals: list[tuple[int, bytes]] = []
        found = block.find(_EVAL)
        while found >= 0:
            place = int(np.searchsorted(ends, found))
            end = int(ends[place]) + 1
            evals.append((place, block[starts[place] : end]))
            found = block.find(_EVAL, end)
        losses = _LOSS.findall(block)
        values = _floats(losses) if len(losses) == len(ends) - len(evals) else None
        if values is None or any(_TRAIN in line for _, line in evals):
            return self._add_lines(block, at)
        if evals:
            starts = np.delete(starts, [place for place, _ in evals])
        rows = _steps(block, starts)
        latest = self.steps[-1] if self.steps else -1
        if rows is None or (len(rows) and (rows[0] <= latest or (np.diff(rows) <= 0).any())):
            return self._add_lines(block, at)
        starts = (starts + at).astype(np.int64)
        for before, (place, line) in enumerate(evals):
            index = place - before - 1
            self._add_eval(line, int(starts[index]) if index >= 0 else self._last_offset())
        self.steps.frombytes(rows.tobytes())
        self.losses.extend(values)
        self.offsets.frombytes(starts.tobytes())
        return None

    def _add_lines(self, block: bytes, at: int) -> None:
        for line in block.splitlines(keepends=True):
            if _TRAIN in line:
                row = parse(line)
                step = row.get("step")
                if isinstance(step, int) and 0 <= step < 2**63:
                    if self.steps and step <= self.steps[-1]:
                        self._forget(step)
                    self.steps.append(step)
                    self.losses.append(number(row.get("train/loss")))
                    self.offsets.append(at)
            if _EVAL in line:
                self._add_eval(line, self._last_offset())
            at += len(line)

    def _forget(self, step: int) -> None:
        while self.steps and self.steps[-1] >= step:
            for column in (self.steps, self.losses, self.offsets):
                column.pop()
        self.evals = [row for row in self.evals if number(row.get("step")) < step]

    def _last_offset(self) -> int | None:
        return self.offsets[-1] if self.offsets else None

    def _add_eval(self, line: bytes, train_row: int | None) -> None:
        if (row := parse(line)) and self.room > 0:
            self.room -= len(row)
            row[BEFORE] = train_row
            self.evals.append(row)


def _floats(texts: list[bytes]) -> array[float] | None:
    """The numbers, NaN and Infinity included; None if one is something else (null)."""
    try:
        return array("d", map(float, texts))
    except ValueError:
        return None


def _steps(block: bytes, starts: np.ndarray) -> np.ndarray | None:
    """The steps of the rows that start there; None if one of them has none.

    Rows are logged at even distances, so that two rows at either end and one in the middle settle the rest: a step
    that was logged again or left out moves the end. Only otherwise is each step read. (A run's first row is step 1,
    whatever the distance of the others.)
    """
    count = len(starts)

    def step(row: int) -> int:
        found = _STEP.search(block, int(starts[row]), block.find(b"\n", int(starts[row])))
        return int(found[1][:18]) if found else -1

    for apart in (0, 1) if count > 8 else ():
        first, second = step(apart), step(apart + 1)
        even = first + (second - first) * np.arange(-apart, count - apart, dtype=np.int64)
        even[:apart] = step(0)
        if 0 <= first < second and all(step(row) == even[row] for row in (count // 2, count - 2, count - 1)):
            return even
    steps = np.array([step(row) for row in range(count)], dtype=np.int64)
    return None if (steps < 0).any() else steps
