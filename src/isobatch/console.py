"""What a person sees while a run goes on: the plan, progress, one line per evaluation, the result."""

from __future__ import annotations

from typing import Any


class Console:
    """Silent; the base of the ones that print."""

    def plan(self, plan: dict[str, Any], notes: list[str]) -> None:
        """Before training: the batch arithmetic, devices, length, and what this plan cannot keep equal."""

    def advance(self, step: int, epoch: int) -> None:
        """After every step; must cost next to nothing."""

    def step(self, row: dict[str, Any]) -> None:
        """A logged step."""

    def evaluation(self, row: dict[str, Any]) -> None:
        """An evaluation."""

    def result(self, summary: dict[str, Any], run_dir: str) -> None:
        """After training."""


def make_console(is_main: bool, total_steps: int, steps_per_epoch: int) -> Console:
    return Console()
