"""Samples of the training set that are held out for evaluation: a share, or one fold of a cross-validation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.checks import within
from isobatch.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Which training samples are evaluated on instead of the data set's own evaluation samples.

    Drawn from `split_seed` alone: neither the run's seed nor the plan changes the split.

    Args:
        holdout: a share of them (0.1), or how many (500); null = none, the data set has its own.
        fold, folds: of a cross-validation: fold 0 .. folds-1 is held out, the others are trained on. The folds of one
            `split_seed` are disjoint, and every sample is in one of them.
        stratified: every class is held out in proportion.
    """

    holdout: float | None = None
    fold: int | None = None
    folds: int = 5
    stratified: bool = True
    split_seed: int = 0

    def __post_init__(self) -> None:
        getattr(super(), "__post_init__", lambda: None)()  # of what else an options class has
        if self.holdout is not None:
            count = self.holdout >= 1 and self.holdout == math.floor(self.holdout)
            if not (0 < self.holdout < 1 or count):
                raise ConfigError("data.holdout", self.holdout, "is neither a share nor a number of samples",
                                  "set data.holdout=0.1, data.holdout=500 or data.holdout=null")  # fmt: skip
        within("data.folds", self.folds, 2, 100_000)
        within("data.split_seed", self.split_seed, 0, 2**32 - 1)
        if self.fold is not None:
            if self.holdout is not None:
                raise ConfigError("data.fold", self.fold, f"and data.holdout={self.holdout:g} both say what is held out",
                                  "set one of them to null")  # fmt: skip
            if not 0 <= self.fold < self.folds:
                raise ConfigError("data.fold", self.fold, f"of data.folds={self.folds} there are 0 to {self.folds - 1}",
                                  f"set data.fold={self.folds - 1}, or data.folds={self.fold + 1}")  # fmt: skip
        for key, usual, needed in (("folds", 5, "fold"), ("stratified", True, ""), ("split_seed", 0, "")):
            if getattr(self, key) != usual and (self.fold is None if needed else not self.holds_out):
                raise ConfigError(f"data.{key}", getattr(self, key), "says nothing where nothing is held out",
                                  f"set data.{needed or 'holdout'}, or data.{key}={str(usual).lower()}")  # fmt: skip

    @property
    def holds_out(self) -> bool:
        return self.fold is not None or self.holdout is not None

    def parted(self, labels: Any) -> tuple[Any, Any]:
        """(training, held out): numbers of samples, in their order, int64 arrays.

        Args:
            labels: (N,) class numbers.
        Raises:
            ConfigError: one of the two would be empty.
        """
        import numpy

        labels = numpy.asarray(labels)
        drawn = numpy.random.RandomState(self.split_seed).permutation(len(labels))
        if self.stratified:  # class after class, each in the drawn order: what is taken at even distances is a share of each
            drawn = drawn[numpy.argsort(labels[drawn], kind="stable")]
        place = numpy.empty(len(labels), dtype=numpy.int64)
        place[drawn] = numpy.arange(len(labels))
        if self.fold is not None:
            out = place % self.folds == self.fold
        else:
            assert self.holdout is not None
            n = int(self.holdout) if self.holdout >= 1 else round(self.holdout * len(labels))
            out = (place + 1) * n // len(labels) > place * n // len(labels)
            if n >= len(labels):
                out[:] = True
        train, held = numpy.flatnonzero(~out), numpy.flatnonzero(out)
        if not (len(train) and len(held)):
            key = "fold" if self.fold is not None else "holdout"
            raise ConfigError(f"data.{key}", getattr(self, key), f"of {len(labels)} samples {len(train)} would be trained on "
                              f"and {len(held)} held out", f"set data.{key} so that both have some")  # fmt: skip
        return train, held


class SomeSamples:
    """Some samples of a dataset, as a dataset.

    Args:
        rows: (N,) int64 array of their numbers in it.
    """

    def __init__(self, dataset: Any, rows: Any):
        self.dataset, self.rows = dataset, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self.rows[index])]

    def at_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "at_epoch"):
            self.dataset.at_epoch(epoch)

    @property
    def largest_epoch(self) -> int:
        return getattr(self.dataset, "largest_epoch", 0)

    def describe(self, index: int) -> str:
        row = int(self.rows[index])
        name = getattr(self.dataset, "describe", None)
        return f"sample {row}" if name is None else str(name(row))


def pairs(train: tuple[Tensor, Tensor], evaluation: tuple[Tensor, Tensor] | None,
          options: HeldOut) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:  # fmt: skip
    """(inputs, targets) of training, evaluation and test in memory: what is held out, where something is, is evaluated on, and
    the data set's own evaluation samples become the test."""
    if not options.holds_out:
        assert evaluation is not None
        return train, evaluation, None
    rest, held = options.parted(train[1].numpy())
    return (train[0][rest], train[1][rest]), (train[0][held], train[1][held]), evaluation
