"""`metrics=auto`: the usual metrics of a task, as sums and counts by batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from isobatch.metrics.base import TORCHS, Metric, kind
from isobatch.runtime.distributed import Ranks

TOP = 5  # answers that accuracy_top5 looks at


def build(output: Any, targets: Any, num_classes: int, ignored: int | None) -> list[Metric]:
    of = kind(output, targets, num_classes)
    if of == "classes":
        return [Classes(num_classes, ignored)]
    if of == "tokens":
        return [Tokens(ignored)]
    if of == "masks":
        return [Masks(output.shape[1], ignored)]
    if of == "labels":
        from isobatch.metrics.named import labels

        return labels(output.shape[1])
    return [Numbers(targets[0].numel())] if of == "numbers" else []


class Classes(Metric):
    """accuracy and, of more than five classes, accuracy_top5; output (N, C), targets (N,)."""

    columns = 3

    def __init__(self, num_classes: int, ignored: int | None = None):
        self.many, self.ignored = num_classes > TOP, ignored
        self.names = ("accuracy", "accuracy_top5") if self.many else ("accuracy",)

    def fill(self, slot: Tensor, number: int, output: Any, targets: Any) -> None:
        top = output.topk(min(TOP, output.shape[1]), dim=1).indices == targets.unsqueeze(1)
        if self.ignored is not None:  # which may be the number of a class
            top &= (targets != self.ignored).unsqueeze(1)
        slot[0] = top[:, 0].sum()
        slot[1] = top.sum()
        slot[2] = len(targets) if self.ignored is None else (targets != self.ignored).sum()

    def values(self, totals: list[float], ranks: Ranks) -> dict[str, float]:
        right, within, samples = totals
        found = {"accuracy": right / samples if samples else 0.0}
        if self.many:  # else every answer is among them
            found["accuracy_top5"] = within / samples if samples else 0.0
        return found


class Tokens(Metric):
    """accuracy and perplexity of the tokens that count; output (N, C, L), targets (N, L)."""

    names = ("accuracy", "perplexity")
    columns = 3

    def __init__(self, ignored: int | None = None):
        self.ignored = TORCHS if ignored is None else ignored

    def fill(self, slot: Tensor, number: int, output: Any, targets: Any) -> None:
        valid = targets != self.ignored
        slot[0] = ((output.argmax(1) == targets) & valid).sum()
        slot[1] = functional.cross_entropy(output, targets, ignore_index=self.ignored, reduction="sum")
        slot[2] = valid.sum()

    def values(self, totals: list[float], ranks: Ranks) -> dict[str, float]:
        right, entropy, tokens = totals
        if not tokens:
            return {"accuracy": 0.0, "perplexity": math.inf}
        mean = entropy / tokens
        return {"accuracy": right / tokens, "perplexity": math.exp(mean) if mean < 700 else math.inf}


class Masks(Metric):
    """pixel_accuracy, and mean_iou: the mean over the classes that occur of intersection / union over the whole set, not of a
    mean over batches; output (N, C, ...), targets (N, ...).
    """

    names = ("mean_iou", "pixel_accuracy")

    def __init__(self, num_classes: int, ignored: int | None = None):
        self.classes, self.ignored = num_classes, TORCHS if ignored is None else ignored
        self.columns = 3 * num_classes

    def fill(self, slot: Tensor, number: int, output: Any, targets: Any) -> None:
        valid = targets != self.ignored
        said, there = output.argmax(1)[valid], targets[valid]
        n = self.classes
        slot[:n] = torch.bincount(there[said == there], minlength=n)
        slot[n : 2 * n] = torch.bincount(said, minlength=n)
        slot[2 * n :] = torch.bincount(there, minlength=n)

    def values(self, totals: list[float], ranks: Ranks) -> dict[str, float]:
        n = self.classes
        each = list(zip(totals[:n], totals[n : 2 * n], totals[2 * n :], strict=True))
        ious = [both / (said + there - both) for both, said, there in each if said + there]
        pixels = sum(there for _, _, there in each)
        return {"mean_iou": sum(ious) / len(ious) if ious else 0.0,
                "pixel_accuracy": sum(both for both, _, _ in each) / pixels if pixels else 0.0}  # fmt: skip


class Numbers(Metric):
    """mae, rmse, and r2: the mean over the outputs of 1 - squared error / variance (sklearn's r2_score)."""

    names = ("mae", "rmse", "r2")

    def __init__(self, outputs: int):
        self.outputs, self.columns = outputs, 4 * outputs + 1

    def fill(self, slot: Tensor, number: int, output: Any, targets: Any) -> None:
        wanted = targets.to(slot.dtype).reshape(len(targets), -1)
        error = output.to(slot.dtype).reshape(len(targets), -1) - wanted
        k = self.outputs
        slot[:k] = error.abs().sum(0)
        slot[k : 2 * k] = error.square().sum(0)
        slot[2 * k : 3 * k] = wanted.sum(0)
        slot[3 * k : 4 * k] = wanted.square().sum(0)
        slot[4 * k] = len(targets)

    def values(self, totals: list[float], ranks: Ranks) -> dict[str, float]:
        k, n = self.outputs, totals[-1]
        absolute, squared, sums, squares = (totals[i * k : (i + 1) * k] for i in range(4))
        spread = [square - total * total / n for total, square in zip(sums, squares, strict=True)]
        r2 = [1 - error / v if v > 0 else float(not error) for error, v in zip(squared, spread, strict=True)]
        return {"mae": sum(absolute) / (n * k), "rmse": math.sqrt(sum(squared) / (n * k)), "r2": sum(r2) / k}
