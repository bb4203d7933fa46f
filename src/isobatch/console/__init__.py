"""What a person sees while a run goes on: the plan, progress, one line per evaluation, the result.

All of it, but the moving bar, also goes into the run's train.log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Console", "make_console"]


class Console:
    """Silent; the base of the ones that print."""

    def plan(self, view: Mapping[str, str], notes: Sequence[str]) -> None:
        """Before training: the batch arithmetic, devices, length, and what this plan cannot keep equal."""

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Numbers below each other, after the plan."""

    def begin(self, step: int) -> None:
        """Training starts after `step` steps."""

    def advance(self, step: int, epoch: int) -> None:
        """After every step; must cost next to nothing."""

    def step(self, row: Mapping[str, Any]) -> None:
        """A logged step."""

    def counted(self, done: int) -> None:
        """Of a task that goes through samples without training: so many are done."""

    def message(self, *lines: str) -> None:
        """Lines for a person, as they are."""

    def evaluation(self, row: Mapping[str, Any], improved: Sequence[str] = ()) -> None:
        """An evaluation; `improved` are the metrics that were never better."""

    def result(self, summary: Mapping[str, Any], run_dir: str, how_to_look: Sequence[str] = ()) -> None:
        """After training. Takes down what moves, however the run ended."""


def make_console(is_main: bool, total_steps: int, steps_per_epoch: int, ahead: int = 0) -> Console:
    """A live one on a terminal, lines elsewhere (files, pipes, notebooks), nothing on ranks other than the main one."""
    if not is_main:
        return Console()
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        from isobatch.console.live import LiveConsole

        return LiveConsole(total_steps, steps_per_epoch, ahead)
    from isobatch.console.plain import PlainConsole

    return PlainConsole(total_steps, steps_per_epoch, ahead)
