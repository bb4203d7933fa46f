"""Metrics of boxes. torchmetrics' want a list of what each picture has; a batch has a row for each, with room left over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from isobatch.errors import JobFailed
from isobatch.metrics import PACKAGES
from isobatch.metrics.named import Library

PARTS = "boxes", "scores", "labels"


class Boxes(Library):
    """`boxes` (N, room, 4), `labels` (N, room), below 0 where there is no box, and of outputs `scores` (N, room)."""

    def __init__(self, name: str, make: Callable[[], Any], of: str):
        super().__init__(name, make, of)
        for package in PACKAGES.get(name, ()):
            logging.getLogger(package).setLevel(logging.WARNING)  # else each evaluation has a page of its own words

    def fill(self, slot: Tensor, number: int, output: Any, targets: Any) -> None:
        super().fill(slot, number, self._parts(output, PARTS), self._parts(targets, ("boxes", "labels")))

    def _parts(self, tree: Any, wanted: tuple[str, ...]) -> dict[str, Tensor]:
        if not isinstance(tree, Mapping) or not all(isinstance(tree.get(part), Tensor) for part in wanted):
            raise JobFailed(f"metrics.names: {self.name} asks outputs and targets for {', '.join(wanted)} with a row for each "
                            f"picture (docs/extending.md), and these are {type(tree).__name__}")  # fmt: skip
        return {part: tree[part] for part in wanted}

    def _update(self, metric: Any, output: Any, targets: Any) -> None:
        super()._update(metric, of_pictures(output), of_pictures(targets))

    def _value(self, metric: Any) -> dict[str, float]:
        """Without what there is none of, as of small boxes in pictures that have only large ones (COCO says -1)."""
        return {key: value for key, value in super()._value(metric).items() if value >= 0 and key != "classes"}


def of_pictures(rows: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What each picture has, without the room that it does not use."""
    there = rows["labels"] >= 0
    return [{part: values[i][kept] for part, values in rows.items()} for i, kept in enumerate(torch.unbind(there))]
