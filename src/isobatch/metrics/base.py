"""What an evaluation asks of a metric, and what kind of task it is about."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isobatch.runtime.distributed import Ranks

TORCHS = -100  # the label that torch's losses leave out


class Metric:
    """Sees every batch of an evaluation once, on the rank and device that has it.

    Attributes:
        names: of its values, without `eval/`; () = they are not known before the first evaluation.
        columns: numbers that `fill` writes for each batch; they are summed over all batches, in the same order on any plan.
    """

    names: tuple[str, ...] = ()
    columns: int = 0

    def begin(self) -> None:
        """Before an evaluation: forget the one before."""

    def fill(self, slot: Tensor, number: int, output: Any, targets: Any) -> None:
        """Take in batch `number`; `slot` (columns,) holds zeros, in the widest type."""

    def values(self, totals: list[float], ranks: Ranks) -> dict[str, float]:
        """By name, the same on all ranks. A collective. `totals`: the sums of the columns over all batches."""
        raise AssertionError("a metric defines values")


def kind(output: Any, targets: Any, num_classes: int) -> str:
    """`classes` (N,), `tokens` (N, L) and `masks` (N, H, W, ...) of class numbers; `labels`: several of a sample, (N, C);
    `numbers`: of the output's shape; `other`.
    """
    if not (isinstance(output, Tensor) and isinstance(targets, Tensor)) or not output.ndim:
        return "other"
    whole = not targets.is_floating_point() and not targets.is_complex()
    if whole and output.ndim == targets.ndim + 1 and output.shape[:1] + output.shape[2:] == targets.shape:
        if targets.ndim > 1:
            return "tokens" if targets.ndim == 2 else "masks"
        return "classes" if num_classes else "other"
    if output.shape == targets.shape:
        return "numbers" if not num_classes and not whole else "labels" if num_classes and output.ndim == 2 else "other"
    return "other"


def probabilities(output: Any, of: str) -> Any:
    """What a metric of class scores gets, whatever the values of a batch look like: numbers in 0 .. 1."""
    if of in ("classes", "tokens", "masks"):
        return output.softmax(1)
    return output.sigmoid() if of == "labels" else output
