"""The leaderboard as text: report.csv with every digit, and a table in the terminal with a few."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.report.cells import show
from isobatch.report.config_columns import Cell
from isobatch.report.names import short
from isobatch.report.read import one_line
from isobatch.report.table import Column, Leaderboard
from isobatch.run_folder.layout import ENDED

if TYPE_CHECKING:
    from rich.console import Console

_FORMULA = ("=", "+", "-", "@")
_SHOWN_IN_TERMINAL = 40


def write_csv(comparison: Leaderboard, path: Path) -> None:
    """All columns, floats as Python prints them (they read back exactly), an empty cell for what is unknown."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([column.key for column in comparison.columns])
        for row in comparison.rows:
            writer.writerow([_csv_cell(row[column.key]) for column in comparison.columns])


def _csv_cell(value: Cell) -> Cell:
    """A text that a spreadsheet would run as a formula is quoted; numbers in text (-1, +0.5) stay as they are."""
    if isinstance(value, str) and value.startswith(_FORMULA):
        try:
            float(value)
        except ValueError:
            return "'" + value
    return value


def print_table(comparison: Leaderboard, console: Console | None = None) -> None:
    """As many columns as fit; every job that did not complete is listed below with its reason."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    columns = _fitting(comparison, console.width)
    table = Table(title=_title(comparison), title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        numeric = any(isinstance(row[column.key], int | float) for row in comparison.rows)
        table.add_column(Text(_heading(column, comparison.swept)), justify="right" if numeric else "left", overflow="fold")
    leading = {c.key: set(comparison.leading(c.key)) for c in columns}
    for at, row in enumerate(comparison.rows[:_SHOWN_IN_TERMINAL]):
        # Text, not markup: a config value such as [red] is shown as it is.
        table.add_row(*[Text(show(row[c.key]), style=_style(row[c.key], c, at in leading[c.key])) for c in columns])
    console.print(table)
    if len(comparison.rows) > _SHOWN_IN_TERMINAL:
        console.print(f"... and {len(comparison.rows) - _SHOWN_IN_TERMINAL} more in report.csv", highlight=False)
    if spread := comparison.spread():
        console.print(Text(spread))
    for run in comparison.runs:
        if not run.completed:
            console.print(Text(f"job {run.job}: {run.ending}"))
    for folder in comparison.foreign:
        console.print(Text(f"left out: {one_line(folder)} is a run of another program"))


def _heading(column: Column, swept: Sequence[str]) -> str:
    """A heading that breaks where its parts end, so that a narrow column needs no hyphen in a word."""
    if column.key == "samples/s":
        return column.key
    title = short(column.key, swept) if column.key in swept else column.title
    return title.replace(".", ".\n").replace(" ", "\n").replace("/", "/\n")


def _fitting(comparison: Leaderboard, width: int) -> list[Column]:
    """The ranked columns that fit into this many characters."""
    columns = [column for column in comparison.columns if column.rank]

    def needed(column: Column) -> int:
        cells = [len(show(row[column.key])) for row in comparison.rows[:_SHOWN_IN_TERMINAL]]
        return max([*map(len, _heading(column, comparison.swept).split("\n")), *cells]) + 3

    while sum(map(needed, columns)) > width and max(column.rank for column in columns) > 1:
        columns.remove(max(reversed(columns), key=lambda column: column.rank))
    return columns


def _title(comparison: Leaderboard) -> str:
    done = len(comparison.runs) - comparison.failed
    order = f", by {comparison.primary}" if comparison.primary else ""
    pruned = f" (of them {comparison.pruned} pruned)" if comparison.pruned else ""
    return f"{len(comparison.runs)} job{'s' * (len(comparison.runs) != 1)}, {done} completed{pruned}{order}"


def _style(value: Cell, column: Column, leads: bool) -> str:
    if column.key == "state":
        return "green" if value in ENDED else "red"
    if isinstance(value, float) and not math.isfinite(value):
        return "red"
    return "bold green" if leads else ""
