"""Which checkpoints are kept for what their evaluations said (`checkpoint.keep_best`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol


class Wanted(Protocol):
    """As much of group `checkpoint`'s options as decides it."""

    @property
    def keep_best(self) -> int: ...

    def followed(self, result: dict[str, float]) -> str | None: ...

    def direction(self, metric: str) -> str | None: ...


class Leaders:
    """The steps of the best evaluations, at most `keep_best`: (value, step), the best one first; of equals the earlier."""

    def __init__(self, options: Wanted):
        self.options, self.wanted = options, options.keep_best
        self.entries: list[tuple[float, int]] = []
        self.entered = False  # whether the latest evaluation is one of them

    @property
    def steps(self) -> list[int]:
        return [step for _, step in self.entries]

    def saw(self, result: Mapping[str, Any]) -> None:
        """An evaluation's result, with the `step` it is of."""
        self.entered = False
        followed = self.options.followed(dict(result)) if self.wanted else None
        if followed is None or followed not in result or not math.isfinite(result[followed]):
            return
        sign = -1 if self.options.direction(followed) == "max" else 1
        step = int(result["step"])
        entries = [entry for entry in self.entries if entry[1] != step] + [(float(result[followed]), step)]
        self.entries = sorted(entries, key=lambda entry: (sign * entry[0], entry[1]))[: self.wanted]
        self.entered = step in self.steps

    def state_dict(self) -> dict[str, Any]:
        return {"entries": [list(entry) for entry in self.entries]} if self.entries else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.entries = [(float(value), int(step)) for value, step in state["entries"]][: self.wanted]
