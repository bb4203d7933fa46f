"""Results by class, from integer counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Confusion:
    """
    Args:
        counts: (classes, classes) int64, rows are labels and columns predictions.
        names: of the classes; where there are fewer, the number stands in.
    """

    counts: Tensor
    names: Sequence[str]

    def name(self, number: int) -> str:
        return self.names[number] if number < len(self.names) else str(number)

    def rows(self) -> list[dict[str, Any]]:
        """Of each class: its samples, how often it was predicted, how often rightly, and the rates that follow.

        A rate whose denominator is zero is None: a class without samples has no recall.
        """
        right = self.counts.diagonal().tolist()
        samples, predicted = self.counts.sum(1).tolist(), self.counts.sum(0).tolist()
        return [
            {"class": i, "name": self.name(i), "samples": n, "predicted": p, "correct": r,
             "recall": _rate(r, n), "precision": _rate(r, p), "f1": _rate(2 * r, n + p)}
            for i, (n, p, r) in enumerate(zip(samples, predicted, right, strict=True))
        ]  # fmt: skip

    def means(self) -> dict[str, float]:
        """`eval/balanced_accuracy` and `eval/macro_f1`: every class that occurs counts alike, however many samples it has."""
        there = [row for row in self.rows() if row["samples"]]
        return {f"eval/{key}": sum(row[of] for row in there) / len(there)
                for key, of in (("balanced_accuracy", "recall"), ("macro_f1", "f1"))}  # fmt: skip

    def confused(self, most: int = 10) -> list[dict[str, Any]]:
        """The most frequent mistakes: label, prediction, count, and their share of the label's samples."""
        wrong = self.counts.clone()
        wrong.fill_diagonal_(0)
        pairs = wrong.nonzero().tolist()
        found = [(int(wrong[i, j]), i, j) for i, j in pairs]
        found.sort(key=lambda entry: (-entry[0], entry[1:]))
        totals = self.counts.sum(1).tolist()
        return [{"label": self.name(i), "prediction": self.name(j), "count": n, "share": n / totals[i]}
                for n, i, j in found[:most]]  # fmt: skip


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None
