"""The rows of a run's metrics.jsonl: a JSON object a line, appended while it trains. What a kill has cut off is passed over."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

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


def after(run: Path, step: int) -> frozenset[tuple[int, str]]:
    """Names of the rows of `run` after `step`: what a run that goes on from there logs a second time."""
    found = set()
    with suppress(reading.Unreadable, OSError):
        for row in rows(run):
            if (at := step_of(row)) is not None and at > step:
                with suppress(ValueError, KeyError, TypeError, OverflowError):
                    found.add(name_of(row))
    return frozenset(found)
