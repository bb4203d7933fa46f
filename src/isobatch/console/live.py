"""A terminal: the plan in a frame, a bar that moves, evaluations above it, the result in a frame."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from isobatch.console import Console
from isobatch.console.plain import evaluation_line, look_lines, plan_lines, result_lines, shows_result, table_lines
from isobatch.console.text import Remaining, compared, facts, metrics_of, name_of, progress, relative, to_log
from isobatch.run_folder import layout

REFRESH_PER_S = 4  # each takes the training about a millisecond of Python, so no more than a person can follow
WIDEST = 100
BAR = (12, 36)


class LiveConsole(Console):
    """Only the thread that redraws the bar formats anything; the training leaves numbers behind."""

    def __init__(self, total_steps: int, steps_per_epoch: int, ahead: int = 0):
        self.total, self.epochs = total_steps, -((ahead - total_steps) // steps_per_epoch)
        self.now = self.epoch = 0
        self.row: Mapping[str, Any] = {}
        self._pace = Remaining(total_steps)
        self._out = RichConsole(highlight=False)
        self.noun = ""  # what is counted, where it is no steps
        self._live: Live | None = None
        self._handlers: list[tuple[Any, Any]] = []

    def plan(self, view: Mapping[str, str], notes: Sequence[str]) -> None:
        table = _facts_table(list(view.items()))
        parts: list[Any] = [table]
        if notes:
            parts.append(Text())
            notes_table = Table.grid(padding=(0, 1))
            for note in notes:
                notes_table.add_row(Text("•", style="yellow"), Text(note, style="dim"))
            parts.append(notes_table)
        self._out.print(self._frame(Group(*parts), "[bold]plan[/]", "cyan"))
        to_log(plan_lines(view, notes))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(box=box.SIMPLE_HEAD, header_style="cyan", padding=(0, 1))
        for title in head:
            table.add_column(title, justify="right")
        for line in rows:
            table.add_row(*line)
        self._out.print(table)
        to_log(table_lines(head, rows))

    def begin(self, step: int) -> None:
        self.now = step
        self._pace.begin(step, time.monotonic())
        before = {sys.stdout, sys.stderr}
        self._live = Live(self, console=self._out, refresh_per_second=REFRESH_PER_S, transient=True)
        self._live.start(refresh=True)
        # handlers hold the stream itself, which rich has just wrapped so that what is printed appears above the bar
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in before:
                self._handlers.append((handler, handler.setStream(sys.stdout)))

    def advance(self, step: int, epoch: int) -> None:
        self.now = step
        self.epoch = epoch

    def step(self, row: Mapping[str, Any]) -> None:
        self.row = row

    def counted(self, done: int) -> None:
        self.now, self.noun = done, "samples"

    def message(self, *lines: str) -> None:
        for line in lines:
            self._out.print(Text(f"  {relative(line)}"), soft_wrap=True)
        to_log(lines)

    def evaluation(self, row: Mapping[str, Any], improved: Sequence[str] = ()) -> None:
        line = Text()
        width = len(str(self.total))
        line.append("  ● ", style="green" if improved else "cyan")
        line.append(f"step {row['step']:>{width}}", style="bold")
        for name, value in metrics_of(row):
            line.append(f"   {name} ", style="dim")
            line.append(value, style="bold")
        if improved:
            line.append(f"   best {', '.join(name_of(metric) for metric in improved)}", style="green")
        self._out.print(line, soft_wrap=True)
        to_log([evaluation_line(row, improved)])

    def result(self, summary: Mapping[str, Any], run_dir: str, how_to_look: Sequence[str] = ()) -> None:
        self._stop()
        if not shows_result(summary):
            return
        done = summary["state"] in layout.DONE
        metrics = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for title, justify in (("", "left"), ("final", "right"), ("best", "right")):
            metrics.add_column(title, justify=justify)  # type: ignore[arg-type]
        for key, final, best in compared(summary):
            metrics.add_row(Text(key, style="cyan"), Text(final, style="bold"), Text(best, style="bold green"))
        body = Group(metrics, Text(), _facts_table(facts(summary, run_dir)))
        colour = "green" if done else "yellow"
        self._out.print(self._frame(body, f"[bold]{summary['state']}[/]", colour))
        for line in look_lines(how_to_look):
            self._out.print(Text(relative(line), style="dim"), soft_wrap=True)
        to_log(result_lines(summary, run_dir, how_to_look))

    def _stop(self) -> None:
        if self._live is not None:
            for handler, stream in self._handlers:
                handler.setStream(stream)
            self._live.stop()
            self._live, self._handlers = None, []

    def _frame(self, body: Any, title: str, colour: str) -> Panel:
        return Panel(body, title=title, title_align="left", border_style=colour, box=box.ROUNDED, padding=(0, 1),
                     width=min(self._out.width, WIDEST))  # fmt: skip

    def __rich__(self) -> Text:
        """The bar and what fits beside it."""
        now, step = time.monotonic(), min(self.now, self.total)
        head = f"  {self.noun or f'epoch {min(self.epoch + 1, self.epochs)}/{self.epochs}'}  "
        parts = {"count": f"{step:,}/{self.total:,}", **progress(self.row), "left": self._pace.left(step, now)}
        for least in ("skipped", "scale", "lr", "count", "rate"):  # what a narrow terminal can do without
            room = self._out.width - len(head) - sum(len(part) + 2 for part in parts.values() if part) - 1
            if room >= BAR[0]:
                break
            parts.pop(least, None)
        line = Text(head, no_wrap=True, overflow="ellipsis", end="")
        line.append_text(_bar(step / self.total, min(max(room, BAR[0]), BAR[1])))
        for name, part in parts.items():
            if part:
                label, _, value = part.partition(" ") if name in ("loss", "lr", "scale") else ("", "", part)
                line.append(f"  {label} " if label else "  ", style="dim")
                line.append(value, style="bold" if name == "loss" else "")
        return line


def _bar(done: float, width: int) -> Text:
    """`width` cells, of which half ones show too."""
    halves = round(2 * width * done)
    full, half = divmod(halves, 2)
    rest = width - full - half
    colour = "green" if done >= 1 else "cyan"
    bar = Text("━" * full + "╸" * half, style=colour)
    return bar.append("─" * rest, style="bright_black")


def _facts_table(pairs: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for label, text in pairs:
        table.add_row(Text(label, style="cyan"), Text(text, overflow="fold"))
    return table
