"""torch.cuda's streams and events as vector clocks: what is in order, and what the host may read already."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from pretended.machine import here


class Stream:
    """A queue of work.

    time: operators queued so far. knows: other stream -> how far this one has waited for it. reached: how far the host
    has. pending: copies to main memory that the host may not look at yet, as (time, target, value).
    """

    def __init__(self, device: Any = None, priority: int = 0, *, counted: bool = True, **_: Any):
        machine = here()
        self.device = torch.device("cuda", machine.index_of(device))
        machine.streams += counted
        machine.all_streams.add(self)
        self.time = self.reached = 0
        self.knows: dict[Stream, int] = {}
        self.pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.device_index, self.device_type, self.priority = self.device.index, 1, priority
        self.stream_id = self.cuda_stream = machine.streams if counted else 0

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        here().check_alive()
        for stream, time in event.marks.items():
            if stream is not self:
                self.knows[stream] = max(self.knows.get(stream, 0), time)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        here().waits("synchronize a stream", self.device)
        self.arrive()

    def arrive(self, time: int | None = None) -> None:
        """The host has waited for what was queued up to `time` (None: all), and for what that had waited for."""
        if time is None:
            for stream, known in self.knows.items():
                stream.arrive(known)
        time = self.time if time is None else time
        self.reached = max(self.reached, time)
        due = [entry for entry in self.pending if entry[0] <= time]
        if due:
            self.pending = [entry for entry in self.pending if entry[0] > time]
            with _disable_current_modes():
                for _, target, value in due:
                    target.copy_(value)

    def query(self) -> bool:
        here().check_alive()
        return self.reached >= self.time

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        self._before = here().local.current
        here().local.current = self.device.index
        here().local.entered.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        here().local.entered.pop()
        here().local.current = self._before


class Event:
    """marks: stream -> how far it (or what it had waited for) was when the event was recorded."""

    def __init__(self, *_: Any, **__: Any):
        self.marks: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        here().check_alive()
        stream = stream or here().stream()
        self.marks = {**stream.knows, stream: stream.time}

    def wait(self, stream: Stream | None = None) -> None:
        (stream or here().stream()).wait_event(self)

    def synchronize(self) -> None:
        here().check_alive()
        for stream, time in self.marks.items():
            stream.arrive(time)

    def query(self) -> bool:
        here().check_alive()
        return all(stream.reached >= time for stream, time in self.marks.items())

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Entered:
    """torch.cuda.stream(...): None changes nothing."""

    def __init__(self, stream: Stream | None):
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *_: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__()
