"""Small models and data whose right answers can be worked out by hand, for the tests of precision and wrappers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isobatch import data, model
from isobatch.data import DataInfo, Split, Splits

QUIET = ("logger=none", "threads=1", "scheduler=constant", "sampler=sequential", "epochs=null", "log_every=1")
PLAIN_SGD = ("optimizer=sgd", "optimizer.momentum=0", "optimizer.weight_decay=0")


def model_of(name: str, build: Callable[[DataInfo], nn.Module]) -> tuple[str, ...]:
    """Overrides that train what `build` returns."""
    fields = [("name", str, name), ("batch_norm", str, "shard"), ("outputs", Any, None), ("bias", Any, None),
              ("init", Any, None), ("freeze", Any, None), ("table", bool, False)]  # fmt: skip
    model.TABLE[name] = make_dataclass("ProbeModel", fields, frozen=True,
                                       namespace={"build": lambda self, info: build(info)})  # fmt: skip
    return "model=linear", f"model.name={name}"


def data_of(name: str, inputs: Tensor, targets: Tensor, classes: int = 0) -> tuple[str, ...]:
    """Overrides that train and evaluate on these tensors, in this order."""
    info = DataInfo(name, tuple(inputs.shape[1:]), classes)

    def load(self: Any, augment: Any, seed: int) -> Splits:
        split = Split(torch.utils.data.TensorDataset(inputs, targets), (inputs, targets))
        return Splits(split, split, info)

    fields = [("name", str, name), ("size", Any, None), ("matrix_seed", Any, None), ("num_workers", Any, None)]
    data.TABLE[name] = make_dataclass("ProbeData", fields, frozen=True, namespace={"kind": "vectors", "load": load})
    return "data=random_matrix", f"data.name={name}"


class ConvNorm(nn.Module):
    """Convolution, batch norm, linear: (N, 1, 8, 8) -> (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), nn.Linear(4 * 9, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = inputs.dtype
        return self.head(torch.relu(self.norm(self.conv(inputs))).flatten(1))


class Scaled(nn.Module):
    """One weight `w`, from `start`: (N, k) -> (N, 1), w times the sum of the row."""

    def __init__(self, start: float):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start]))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.sum(1, keepdim=True) * self.w


class SometimesUnused(nn.Module):
    """Linear parts `first` and `second`, of which `second` is reached by inputs whose first number is positive only.

    `never` has no part in the output. (N, 2) -> (N, 1)
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.first(inputs)
        return output + self.second(inputs) if bool((inputs[:, 0] > 0).any()) else output
