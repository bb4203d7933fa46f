"""The random numbers of each shard: streams of their own, which torch's functions draw from one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from isobatch.runtime.accelerator import generator as default_generator
from isobatch.runtime.randomness import DRAWING
from isobatch.shards.layout import Layout

T = TypeVar("T")
States = dict[torch.device, tuple[torch.Tensor, ...]]


class NotApart(RuntimeError):
    """Something in a forward concerns all shards at once and cannot be told apart."""


def fresh_state(device: torch.device, seed: int) -> torch.Tensor:
    """Of a generator of `device` that was just seeded."""
    return torch.Generator(device).manual_seed(seed).get_state()


class Streams:
    """One stream for each shard of a forward, with the numbers that the shard alone would draw from a seeded generator.

    Each draw puts a stream's state into the default generator, so that any function can draw from it, and takes it out
    again. Between draws that generator holds a label: the number of draws so far, as its seed. Activation checkpointing,
    which saves and restores the default generator around the parts that it runs again, thereby restores the label, and with
    it the streams as they were there. What is drawn past this object leaves the generator in a state that no label has.

    Args:
        device: of the forward; its default generator holds the label. seeds: one for each shard.
        first_label: of a range that no other forward's streams use.
    """

    def __init__(self, layout: Layout, device: torch.device, seeds: list[int], first_label: int):
        self.layout, self.device, self.seeds = layout, device, seeds
        self.labelled = default_generator(device)
        self.first_label, self.draws = first_label, 0
        self.states: States = {}
        self.past: dict[int, States] = {}  # label -> the streams before that draw

    def begin(self) -> None:
        self._label(self.first_label)

    def _label(self, label: int) -> None:
        self.labelled.manual_seed(label)
        self.untouched = self.labelled.get_state()

    def is_untouched(self) -> bool:
        """Whether the labelled generator is as it was left: nothing was drawn past this object."""
        state = self.labelled.get_state()
        # after a part that ran again, an earlier label is back
        return torch.equal(state, self.untouched) or torch.equal(state, fresh_state(self.device, self.labelled.initial_seed()))

    def each(self, device: torch.device, draw: Callable[[int], T]) -> list[T]:
        """`draw(shard)` for each shard, with that shard's stream as the default generator of `device`.

        Raises:
            NotApart: something was drawn past this object.
        """
        with DRAWING:  # the forwards of several devices run in threads and may all draw from the one of the CPU
            if not self.is_untouched():
                raise NotApart("draws random numbers in a way that is not seen (a C++ extension, say)")
            label = self.labelled.initial_seed()
            self.states = self.past.setdefault(label, self.states)
            self.draws += 1
            return self._drawn(default_generator(device), device, draw, label)

    def _drawn(self, generator: torch.Generator, device: torch.device, draw: Callable[[int], T], label: int) -> list[T]:
        before = None if generator is self.labelled else generator.get_state()
        states = self.states.get(device) or tuple(fresh_state(device, seed) for seed in self.seeds)
        drawn, after = [], []
        try:
            for shard, state in enumerate(states):
                generator.set_state(state)
                drawn.append(draw(shard))
                after.append(generator.get_state())
        finally:
            if before is not None:
                generator.set_state(before)
        self.states = {**self.states, device: tuple(after)}
        self._label(label + 1)
        return drawn


def device_of(value: Any) -> torch.device:
    """Of a tensor, or what a factory function is told (None: where it makes tensors if it is told nothing)."""
    if isinstance(value, torch.Tensor):
        return value.device
    return torch.get_default_device() if value is None else torch.device(value)
