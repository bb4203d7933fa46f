"""metrics.csv in the run folder: the rows of metrics.jsonl as a table."""

from __future__ import annotations

import csv
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from isobatch.logger.protocol import Logger, RunInfo
from isobatch.run_folder.rows import name_of

NAME = "metrics.csv"


class CsvLogger(Logger):
    """A column per metric; one that comes later (an evaluation's) is added to the rows before it, empty there."""

    def __init__(self, info: RunInfo):
        self.path = info.run_dir / NAME
        self.how_to_look = [str(self.path)]
        self.columns: list[str] = []
        self._file: Any = None

    def start(self, plan: Mapping[str, Any], run_id: str | None = None, samples: int = 0,
              logged: Collection[tuple[int, str]] = ()) -> None:  # fmt: skip
        """What was written after the checkpoint that a run goes on from is written again."""
        before = [row for row in self._rows() if _number(row.get("samples")) <= samples and _name(row) not in logged]
        before = before if samples else []
        self.columns = list(before[0]) if before else []
        self._write(before)

    def log(self, row: Mapping[str, Any]) -> None:
        found = {key: value for key, value in row.items() if isinstance(value, int | float | str)}
        new = [key for key in found if key not in self.columns]
        if new:
            before = self._rows()
            self.columns += new
            self._write(before)
        csv.DictWriter(self._file, self.columns, restval="", lineterminator="\n").writerow(found)
        self._file.flush()

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rows(self) -> list[dict[str, str]]:
        """Those in the file; a line that a kill has cut off is left out."""
        with suppress(OSError, UnicodeError, csv.Error), self.path.open(encoding="utf-8", newline="") as file:
            return [row for row in csv.DictReader(file) if None not in row and None not in row.values()]
        return []

    def _write(self, rows: list[dict[str, str]]) -> None:
        """The file anew, with a line for the columns."""
        if self._file is not None:
            self._file.close()
        part = self.path.with_name(f"{NAME}.part")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self.columns, restval="", lineterminator="\n")
            if self.columns:
                writer.writeheader()
            writer.writerows(rows)
        os.replace(part, self.path)
        self._file = Path(self.path).open("a", encoding="utf-8", newline="")  # noqa: SIM115, until the end of the run


def _name(row: Mapping[str, str]) -> tuple[int, str] | None:
    """As of what was logged: a cell is empty where the row had nothing."""
    with suppress(ValueError):
        return name_of({key: value for key, value in row.items() if value})
    return None


def _number(text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return float("inf")
