"""The rows of a run's metrics.jsonl: a JSON object a line, appended while it trains. What a kill has cut off is passed over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from isobatch.run_folder import layout, reading

LARGEST = 2 << 30  # bytes of the file


def open_rows(run: Path, name: str = layout.METRICS) -> BufferedReader:
    """The file, for reading bytes.

    Raises:
        Unreadable: see reading.open_file.
    """
    return reading.open_file(run, name, LARGEST)


def rows(run: Path, name: str = layout.METRICS) -> Iterator[dict[str, Any]]:
    """Every whole row, in the order of the file.

    Raises:
        Unreadable: with the first one, if the file cannot be read.
    """
    with open_rows(run, name) as file:
        for line in reading.lines(file):
            if (row := parsed(line)) is not None:
                yield row


def parsed(line: bytes) -> dict[str, Any] | None:
    """The row on this line; None for what is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def step_of(row: Mapping[str, Any] | None) -> int | None:
    """The step of a row; None for one without."""
    try:
        return None if row is None else int(row["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def is_evaluation(row: Mapping[str, Any]) -> bool:
    """Whether it is of an evaluation, and not of a step."""
    return any(key.startswith("eval/") for key in row)


def name_of(row: Mapping[str, Any]) -> tuple[int, str]:
    """Which row of a run this is: the samples it stands at, and whether it is of a step or of an evaluation."""
    return int(row["samples"]), "eval" if is_evaluation(row) else "train"


class Standing(NamedTuple):
    """Where a checkpoint stands: its step, the step of its latest evaluation (one at `step` may be owed), its samples."""

    step: int
    evaluated: int
    samples: int

    def has(self, row: Mapping[str, Any] | None) -> bool:
        """Whether a row is not from beyond the checkpoint; what is no row is not."""
        step = step_of(row)
        return row is not None and step is not None and step <= (self.evaluated if is_evaluation(row) else self.step)


def beyond(run: Path, at: Standing) -> frozenset[tuple[int, str]]:
    """Names of the rows that a logger may have of `run` from beyond a checkpoint: what a run that goes on from there logs a
    second time."""
    found = set()
    with suppress(reading.Unreadable, OSError):
        for row in rows(run):
            if step_of(row) is not None and not at.has(row):
                with suppress(ValueError, KeyError, TypeError, OverflowError):
                    found.add(name_of(row))
    owed = {"eval"} if at.evaluated < at.step else set()
    with suppress(reading.Unreadable, ValueError, KeyError, TypeError, OverflowError):
        for samples, kind in reading.read_mapping(run, layout.LOGGED)["rows"]:
            if samples > at.samples or (samples == at.samples and kind in owed):
                found.add((int(samples), str(kind)))
    return frozenset(found)
