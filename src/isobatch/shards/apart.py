"""Keeps several shards apart while they share a forward: what it draws and what it normalises, it does for each alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from isobatch.shards.draws import HANDLERS, OPENED
from isobatch.shards.norms import NORMS
from isobatch.shards.streams import NotApart, Streams


class Apart(TorchFunctionMode):
    """To be entered around a forward of several shards, and around its backward, which may run parts of it again.

    Args:
        lanes: the streams of each device's forward.
    """

    def __init__(self, lanes: Sequence[Streams]):
        super().__init__()
        self.lanes = {streams.device: streams for streams in lanes}
        self.only = lanes[0] if len(lanes) == 1 else None
        self.normalised = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if (handler := HANDLERS.get(func)) is not None:
            return handler(self.lane(), func, args, kwargs)
        if (norm := NORMS.get(func)) is not None:
            self.normalised += 1
            return norm(self.lane().layout, *args, **kwargs)
        if (body := OPENED.get(func)) is not None:
            with self:
                return body(*args, **kwargs)
        return func(*args, **kwargs)

    @property
    def used(self) -> bool:
        """Whether anything has to be kept apart: something was normalised or drawn."""
        return self.normalised > 0 or any(streams.draws for streams in self.lanes.values())

    def lane(self) -> Streams:
        """Of the device that this thread works on."""
        if self.only is not None:
            return self.only
        return self.lanes[torch.device("cuda", torch.cuda.current_device())]

    def begin(self) -> None:
        self.host = None if torch.device("cpu") in self.lanes else torch.default_generator.get_state()
        for streams in self.lanes.values():
            streams.begin()

    def check(self) -> None:
        """Raise NotApart if anything was drawn past the streams since `begin`."""
        unseen = self.host is not None and not torch.equal(self.host, torch.default_generator.get_state())
        if unseen or not all(streams.is_untouched() for streams in self.lanes.values()):
            raise NotApart("draws random numbers in a way that is not seen (a C++ extension, say)")


def entered() -> AbstractContextManager[Any]:
    """What keeps shards apart in this thread, for a thread that works for it."""
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, Apart)]
    return modes[-1] if modes else nullcontext()
