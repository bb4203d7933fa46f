"""The comparison at the end of every sweep: a leaderboard, curves and bars of all runs below some folders.

Reads what runs leave behind (summary.json, metrics.jsonl, config.yaml) and imports no torch, so it also works on a
machine that only holds the folders: `python -m isobatch.report DIR...`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.report.html import render
from isobatch.report.images import write_images
from isobatch.report.read import ReportError, RunRecord, foreign_runs
from isobatch.report.runs import read_runs, usable_cores
from isobatch.report.table import Leaderboard, tabulate
from isobatch.report.text import print_table, write_csv
from isobatch.report.verdict import Verdict, compare, print_verdicts

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Leaderboard",
    "ReportError",
    "RunRecord",
    "Verdict",
    "compare",
    "print_verdicts",
    "read_runs",
    "usable_cores",
    "write_report",
]


def write_report(folders: Sequence[Path], out: Path, console: Console | None = None, processes: int = 1) -> Leaderboard:
    """Compares all runs below `folders`: out/report.csv, out/report.html, out/report/*.png and a table on the console.

    A folder with a summary.json is a run; a folder of a sweep, or of several, is searched for them. Jobs that failed,
    were refused or died are rows with their reason. processes: see `read_runs`. Raises ReportError if a folder is
    missing or holds no run.
    """
    comparison = replace(tabulate(read_runs(folders, processes)), foreign=foreign_runs(folders))
    out.mkdir(parents=True, exist_ok=True)
    write_csv(comparison, out / "report.csv")
    (out / "report.html").write_text(render(comparison, folders), encoding="utf-8")
    write_images(comparison, out / "report")
    print_table(comparison, console)
    return comparison
