"""Which of these questions a training goes through, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from isobatch.audit import determinism, repeat

if TYPE_CHECKING:
    from isobatch.audit.watched import Hook, Node, Training
    from isobatch.data.feed import WindowData
    from isobatch.train.state import TrainState
    from isobatch.train.step import Parts


def wanted(config: Any, training: Training, lanes: list[torch.device], generators: list[torch.Generator],
           node: Node) -> Hook | None:  # fmt: skip
    """What the windows of `training` go through; None = nothing."""
    twice = determinism.heard(repeat.wanted(config, training.ranks, lanes, training.lane_steps), training.ranks, training.files)
    return in_turn(twice, config.audit.build(training, generators, node))


def in_turn(*hooks: Hook | None) -> Hook | None:
    """One hook of several; None if there are none."""
    there = [hook for hook in hooks if hook is not None]

    def each(state: TrainState, parts: Parts, windows: Iterator[WindowData]) -> Iterator[WindowData]:
        for hook in there:
            windows = hook(state, parts, windows)
        return windows

    return each if there else None
