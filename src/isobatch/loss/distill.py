"""Distillation: the teacher answers while the batch is prepared, so the training step never meets it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from isobatch.shards.layout import Lanes


class Taught(NamedTuple):
    """Targets of a micro batch: the `labels` (N,) or (N, C), and the teacher's `logits` (N, C), fp32."""

    labels: Tensor
    logits: Tensor


class Teaching:
    """`prepare` of a Feed: adds the teacher's logits to the targets, for the very inputs that the student gets.

    The teacher belongs to nobody else: no wrapper, optimizer, checkpoint or `train()` reaches it. It answers for the shards
    of one device at a time, so that its answer does not depend on which devices share a micro step.
    """

    def __init__(self, transform: Any, teacher: nn.Module, autocast: Callable[[], AbstractContextManager]):
        self.transform, self.teacher, self.autocast = transform, teacher, autocast

    @torch.no_grad()
    def __call__(self, inputs: Tensor, targets: Tensor, step: int, shards: tuple[int, ...],
                 lanes: Lanes) -> tuple[Tensor, Taught]:  # fmt: skip
        if self.transform is not None:
            inputs, targets = self.transform(inputs, targets, step, shards, lanes)
        answers = []
        for part in lanes.chunks(inputs):
            with self.autocast():
                answers.append(self.teacher(part).float())
        return inputs, Taught(targets, answers[0] if len(answers) == 1 else torch.cat(answers))


class WithTeacher:
    """The criterion: Hinton's mixture where a teacher answered (training), `base` alone elsewhere (evaluation)."""

    def __init__(self, base: nn.Module, temperature: float, weight: float):
        self.base, self.temperature, self.weight = base, temperature, weight

    def __call__(self, output: Tensor, targets: Tensor | Taught) -> Tensor:
        if not isinstance(targets, Taught):
            return self.base(output, targets)  # type: ignore[no-any-return]
        student = functional.log_softmax(output / self.temperature, dim=1)
        teacher = functional.log_softmax(targets.logits / self.temperature, dim=1)
        distance = functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
        # T^2 keeps the gradients of both terms in proportion when T changes
        taught = self.weight * self.temperature**2 * distance
        return (1 - self.weight) * self.base(output, targets.labels) + taught  # type: ignore[no-any-return]
