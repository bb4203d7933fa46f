"""Lines, for a file, a pipe or a notebook."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from isobatch.console import Console
from isobatch.console.text import (
    Remaining,
    columns,
    compared,
    facts,
    metrics_of,
    name_of,
    progress,
    relative,
    to_log,
)
from isobatch.run_folder import layout

QUIET_S = 5.0  # between two lines of progress: a log file of a long run is still read by people


class PlainConsole(Console):
    """Prints to standard output, and the same to train.log."""

    def __init__(self, total_steps: int, steps_per_epoch: int, ahead: int = 0):
        self.total, self.per_epoch = total_steps, steps_per_epoch
        self.epochs = -((ahead - total_steps) // steps_per_epoch)
        self._pace = Remaining(total_steps)
        self._said = 0.0

    def message(self, *lines: str) -> None:
        for line in lines:
            print(line, flush=True)
        to_log(lines)

    def plan(self, view: Mapping[str, str], notes: Sequence[str]) -> None:
        self.message(*plan_lines(view, notes))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.message(*table_lines(head, rows))

    def begin(self, step: int) -> None:
        self._pace.begin(step, time.monotonic())

    def step(self, row: Mapping[str, Any]) -> None:
        now, step = time.monotonic(), row["step"]
        if now - self._said < QUIET_S and step < self.total:
            return
        self._said = now
        head = f"step {step:>{len(str(self.total))}}/{self.total}, epoch {row['epoch'] + 1}/{self.epochs}"
        parts = [head, *progress(row).values(), self._pace.left(step, now) if step < self.total else ""]
        self.message(", ".join(part for part in parts if part))

    def counted(self, done: int) -> None:
        now = time.monotonic()
        self._said = self._said or now
        if now - self._said >= QUIET_S or done == self.total:
            self._said = now
            left = self._pace.left(done, now) if done < self.total else ""
            self.message(", ".join(part for part in (f"{done:,} of {self.total:,} samples", left) if part))

    def evaluation(self, row: Mapping[str, Any], improved: Sequence[str] = ()) -> None:
        self.message(evaluation_line(row, improved))

    def result(self, summary: Mapping[str, Any], run_dir: str, how_to_look: Sequence[str] = ()) -> None:
        if shows_result(summary):
            self.message(*result_lines(summary, run_dir, how_to_look))


def shows_result(summary: Mapping[str, Any]) -> bool:
    """A run that failed or was refused has its one line from the launcher, and a plan alone has no result."""
    return summary.get("state") in (*layout.ENDED, "stopped") and bool(summary.get("steps") or summary.get("final"))


def plan_lines(view: Mapping[str, str], notes: Sequence[str]) -> list[str]:
    return ["plan", *columns(list(view.items())), *(f"  note: {note}" for note in notes)]


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Right-aligned columns under `head`."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in (head, *rows)]


def evaluation_line(row: Mapping[str, Any], improved: Sequence[str] = ()) -> str:
    found = ", ".join(f"{name} {value}" for name, value in metrics_of(row))
    best = f" (best {', '.join(name_of(metric) for metric in improved)})" if improved else ""
    return f"evaluation at step {row['step']}: {found}{best}"


def result_lines(summary: Mapping[str, Any], run_dir: str, how_to_look: Sequence[str]) -> list[str]:
    metrics = [(key, final + (f", best {best}" if best else "")) for key, final, best in compared(summary)]
    ending = ": ".join(filter(None, (summary["state"], summary.get("reason"))))
    return [ending, *columns([*metrics, *facts(summary, run_dir)]), *look_lines(how_to_look)]


def look_lines(how_to_look: Sequence[str]) -> list[str]:
    return [f"  {'look at it:' if not i else ' ' * 11} {relative(line)}" for i, line in enumerate(how_to_look)]
