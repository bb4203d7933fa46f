"""Recordings of a few steps by torch's own tools: a trace of what ran, a history of what was allocated."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from isobatch.profile.profiler import Profiler
from isobatch.runtime import accelerator

log = logging.getLogger("isobatch")


class Tracer(Profiler):
    """
    Args:
        start: steps before the first one that is recorded. steps: that are recorded; fewer where the training ends.
    """

    def __init__(self, path: Path, start: int, steps: int, stacks: bool, device: torch.device):
        self.path, self.start, self.steps, self.stacks, self.device = path, start, steps, stacks, device
        self.running: Any = None

    def windows(self, windows: Iterator[Any], state: Any, parts: Any) -> Iterator[Any]:
        for done, window in enumerate(windows):  # the window is read before the recording begins, in workers or ahead
            if done == self.start + self.steps:
                self._write()
            if done == self.start:
                accelerator.wait(self.device)
                self.running = torch.profiler.profile(record_shapes=True, profile_memory=True, with_stack=self.stacks)
                self.running.start()
            if self.running is None:
                yield window
                continue
            with torch.profiler.record_function(f"step {window.window.step + 1}"):
                yield window

    def _write(self) -> None:
        if self.running is None:
            return
        accelerator.wait(self.device)
        recorded, self.running = self.running, None
        recorded.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self.path))
        log.info("profile: %s (https://ui.perfetto.dev opens it)", self.path)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._write()


class MemoryHistory(Profiler):
    """
    Args:
        steps: after which the history is written; also where memory runs out. events: that are kept, the newest ones.
    """

    def __init__(self, path: Path, steps: int, events: int):
        self.path, self.steps, self.events = path, steps, events
        self.recording = False

    def __enter__(self) -> Profiler:
        torch.cuda.memory._record_memory_history(max_entries=self.events)  # the documented way, for all its underscore
        self.recording = True
        return self

    def windows(self, windows: Iterator[Any], state: Any, parts: Any) -> Iterator[Any]:
        for done, window in enumerate(windows):
            if done == self.steps:
                self._write()
            yield window

    def _write(self) -> None:
        if not self.recording:
            return
        self.recording = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(self.path))
        torch.cuda.memory._record_memory_history(enabled=None)
        log.info("profile: %s (https://pytorch.org/memory_viz opens it)", self.path)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._write()
