"""Random numbers of a thread's own: what one of several threads draws while it runs a shard comes from a generator of its own,
with the numbers that torch's default generator would give after the same seed.

On a CPU there is one default generator for all threads. A `TorchFunctionMode` sees each of torch's functions that draws, as in
draws.py. Dropout, which is most of them, asks the thread's generator; for any other one the default generator holds that of the
thread for the length of the call, under a lock, so that the very function draws what it always does. Activation checkpointing
asks torch.random for the state of the default generator, before a part and before it is run again: `told_apart` answers
with that of the thread that asks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from isobatch.runtime.randomness import DRAWING
from isobatch.shards.draws import HANDLERS, OPENED, of_dropout

DROPOUT = {F.dropout, torch.dropout, torch.dropout_}
_of_thread = threading.local()


class Own(TorchFunctionMode):
    """To be entered around forward and backward of a shard on a CPU, by the thread that runs them.

    Attributes:
        generator: what is drawn from; to be seeded before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        _of_thread.generator = self.generator
        try:
            with self:
                yield
        finally:
            del _of_thread.generator

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if func in DROPOUT:
            return self._dropout(func, args, kwargs)
        if func in HANDLERS:
            return self._instead(func, args, kwargs)
        if (body := OPENED.get(func)) is not None:
            with self:
                return body(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch does on a CPU, from the own generator and beside other threads."""
        x, p, training, inplace = of_dropout(*args, **kwargs)
        if not training or p in (0, 1) or not x.numel():  # draws nothing, or refuses
            return func(*args, **kwargs)
        with torch.no_grad():
            mask = torch.empty_like(x).bernoulli_(1 - p, generator=self.generator).div_(1 - p)
        return x.mul_(mask) if inplace or func is torch.dropout_ else x * mask

    def _instead(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        default = torch.default_generator
        with DRAWING:
            before = default.get_state()
            default.set_state(self.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(default.get_state())
                default.set_state(before)


class _PerThread:
    """torch.random's default generator, which in a thread that draws for itself is that thread's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_of_thread, "generator", torch.default_generator), name)


@contextmanager
def told_apart() -> Iterator[None]:
    """While threads draw for themselves: torch.get_rng_state, set_rng_state and their kind are about the thread that asks."""
    original = torch.random.default_generator
    torch.random.default_generator = _PerThread()  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.random.default_generator = original
