"""The files that a run leaves behind, written by the main rank alone (names and keys are an interface: see README)."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

from isobatch.errors import JobFailed
from isobatch.run_folder import layout, reading, rows

log = logging.getLogger("isobatch")


def write_json(path: Path, data: Any) -> None:
    """Replace `path` in one move, so that a reader never sees half a file. A folder that somebody deleted is made anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(finite(data), indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace `path` in one move, whatever it was (a pipe would be waited for)."""
    part = path.with_name(path.name + ".part")
    if not part.is_file():
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def finite(data: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become strings ("nan", "inf"), which float() reads back."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return data


class RunFiles:
    """`config.yaml`, `plan.json`, `metrics.jsonl` and `summary.json` of one run folder; silent on other ranks."""

    def __init__(self, folder: Path, is_main: bool):
        self.folder, self.is_main = folder, is_main
        self._metrics: Any = None
        self._losing = False

    def config(self, text: str) -> None:
        if self.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)  # deleted since the start
            write_text(self.folder / layout.CONFIG, text)

    def plan(self, plan: dict[str, Any]) -> None:
        self.planned = plan
        if self.is_main:
            write_json(self.folder / layout.PLAN, plan)

    def plan_also(self, facts: dict[str, Any]) -> None:
        """What is found out between the plan and the first step."""
        self.plan({**self.planned, **facts})

    def resume_metrics(self, at: rows.Standing, logged: frozenset[tuple[int, str]] = frozenset()) -> None:
        """Drop the rows from beyond a checkpoint: a resumed run writes them again.

        `logged`: what a logger may have of them (see `beyond`); kept in a file, should this run be interrupted too.
        """
        path = self.folder / layout.METRICS
        if not self.is_main:
            return
        if logged:
            with contextlib.suppress(OSError):
                write_json(self.folder / layout.LOGGED, {"rows": sorted(logged)})
        part = path.with_name(path.name + ".part")
        try:
            with rows.open_rows(self.folder) as before, part.open("wb") as after:
                whole = (line for line in reading.lines(before) if line.endswith(b"\n"))
                after.writelines(line for line in whole if at.has(rows.parsed(line)))
            os.replace(part, path)
        except reading.Missing:
            return
        except (reading.Unreadable, OSError) as problem:
            log.warning("metrics.jsonl begins anew: the earlier one %s", getattr(problem, "strerror", None) or problem)
            with contextlib.suppress(OSError):
                path.unlink()

    def row(self, row: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl; flushed, so that a killed run keeps what it logged.

        A full disk costs lines, not the training.
        """
        if not self.is_main:
            return
        try:
            if self._metrics is None:
                self._metrics = (self.folder / layout.METRICS).open("a", encoding="utf-8")
            self._metrics.write(json.dumps(finite(row)) + "\n")
            self._metrics.flush()
            self._losing = False
        except OSError as error:
            if not self._losing:
                log.warning("metrics.jsonl cannot be written (%s); training goes on", error.strerror)
            self._losing = True

    def summary(self, summary: dict[str, Any]) -> None:
        """Raise JobFailed where a completed run cannot say so; of any other ending the reason itself is told."""
        if not self.is_main:
            return
        try:
            write_json(self.folder / layout.SUMMARY, summary)
        except OSError as error:
            problem = f"{self.folder / layout.SUMMARY} cannot be written ({error.strerror})"
            if summary.get("state") in layout.ENDED:
                raise JobFailed(problem) from None
            log.warning(problem)

    def completed(self) -> bool:
        """Whether the folder holds the summary of a run that came to its end."""
        try:
            return bool(reading.read_mapping(self.folder, layout.SUMMARY).get("state") in layout.DONE)
        except reading.Unreadable:
            return False

    def close(self) -> None:
        if self._metrics is not None:
            with contextlib.suppress(OSError):  # what a full disk did not take has been told
                self._metrics.close()
            self._metrics = None
