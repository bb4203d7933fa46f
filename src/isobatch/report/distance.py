"""How far a run is from the first one: where the losses part and how far the weights lie from each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.report.metrics import Metrics

WEIGHTS_FILE = "checkpoints/last/model.safetensors"


@dataclass(frozen=True)
class Reference:
    """The run that the others are compared with."""

    job: str
    folder: Path
    summary: Mapping[str, Any]
    metrics: Metrics


@dataclass(frozen=True)
class Distance:
    """One run against the reference. None means unknown: no common step, or no weights to compare.

    parted: the first common step whose train/loss is not the same float, None if there is none.
    common_steps / only_here / only_there: how many logged steps the comparison covers and misses.
    loss: largest absolute difference of train/loss over the common steps, inf where one alone is not finite.
    weights: largest absolute difference over all weights, 0 where the digests agree.
    same_weights: whether the digests agree.
    """

    reference: str | None = None
    parted: int | None = None
    common_steps: int = 0
    only_here: int = 0
    only_there: int = 0
    loss: float | None = None
    weights: float | None = None
    same_weights: bool | None = None

    @property
    def identical(self) -> bool:
        """Every common loss is the same, to the bit; says nothing about steps that only one of them logged."""
        return self.common_steps > 0 and self.parted is None


def difference(reference: Reference, folder: Path, summary: Mapping[str, Any], metrics: Metrics) -> Distance:
    """Compares one run with the reference, by its logged losses and its saved weights."""
    ours, theirs = metrics, reference.metrics
    if np.array_equal(ours.steps, theirs.steps):
        here, there, steps = ours.losses, theirs.losses, ours.steps
    else:
        steps, i, j = np.intersect1d(ours.steps, theirs.steps, assume_unique=True, return_indices=True)
        here, there = ours.losses[i], theirs.losses[j]
    same = (here == there) | (np.isnan(here) & np.isnan(there))
    digests = [s.get("weights_sha256") for s in (summary, reference.summary)]
    same_weights = digests[0] == digests[1] if all(digests) else None
    return Distance(
        reference=reference.job,
        parted=None if same.all() else int(steps[int(same.argmin())]),
        common_steps=len(steps),
        only_here=len(ours.steps) - len(steps),
        only_there=len(theirs.steps) - len(steps),
        loss=_largest(here[~same], there[~same]) if len(steps) else None,
        weights=0.0
        if same_weights
        else weight_distance(weights_path(reference.folder, reference.summary), weights_path(folder, summary)),
        same_weights=same_weights,
    )


def _largest(here: np.ndarray, there: np.ndarray) -> float:
    """Largest |here - there|; inf where it is no number (one is NaN, or infinite)."""
    if not here.size:
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(here.astype(np.float64) - there.astype(np.float64))
    return float(np.where(np.isnan(gap), np.inf, gap).max())


def weights_path(folder: Path, summary: Mapping[str, Any]) -> Path | None:
    """The weights that this run saved, or None. A path that leads out of the run folder is not followed."""
    path = folder / str(summary.get("weights_file") or WEIGHTS_FILE)
    inside = path.resolve().is_relative_to(folder.resolve())
    return path if inside and path.is_file() else None


def weight_distance(one: Path | None, other: Path | None) -> float | None:
    """Largest absolute difference between two safetensors files, tensor by tensor.

    None if a file is missing or damaged, or safetensors is not installed; inf if names or shapes differ, or if one
    of two weights alone is not finite.
    """
    if one is None or other is None:
        return None
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return None
    largest = 0.0
    try:
        with safe_open(one, framework="np") as a, safe_open(other, framework="np") as b:
            if set(a.keys()) != set(b.keys()):
                return math.inf
            for name in a.keys():  # noqa: SIM118, a safe_open is no mapping
                here, there = np.asarray(a.get_tensor(name)), np.asarray(b.get_tensor(name))
                if here.shape != there.shape:
                    return math.inf
                same = (here == there) | ((here != here) & (there != there))
                largest = max(largest, _largest(here[~same], there[~same]))
    except (SafetensorError, OSError, TypeError, ValueError, AttributeError):  # a dtype that numpy lacks included
        return None
    return largest
