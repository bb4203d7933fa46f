"""A loss in which the samples of a forward meet is asked once for each shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from isobatch.errors import JobFailed
from isobatch.given import together
from isobatch.runtime.trees import PerSample
from isobatch.shards.layout import Lanes

Prepare = Callable[..., tuple[Tensor, Any]]


class ShardTargets(NamedTuple):
    """Targets of a micro batch of several shards: `targets` as the loss gets them, `lanes`: how the shards lie in them."""

    targets: Any
    lanes: Lanes


class EachShard:
    """The criterion: `criterion` of every shard, in a mean over the samples or (`averages` False) a sum."""

    def __init__(self, criterion: Any, averages: bool):
        self.criterion, self.averages = criterion, averages

    def __call__(self, output: Any, targets: Any) -> Any:
        if not isinstance(targets, ShardTargets):
            return self.criterion(output, targets)
        lanes = targets.lanes
        outputs, labels = parts(output, lanes), parts(targets.targets, lanes)
        factors = [size / lanes.samples if self.averages else 1.0 for size in lanes.sizes]
        return together([self.criterion(*pair) for pair in zip(outputs, labels, strict=True)], factors)


def parts(tree: Any, lanes: Lanes) -> list[Any]:
    """`tree` for each shard: its rows of every tensor, and all else as it is.

    Raises:
        JobFailed: a tensor has no rows for each sample.
    """
    leaves, form = tree_flatten(tree)
    cut: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and (not leaf.ndim or len(leaf) % lanes.samples):
            raise JobFailed(f"the loss is asked for each shard alone, and gets {tuple(leaf.shape)} numbers for {lanes.samples} "
                            "samples together: set batch.micro to batch.shard, or `couples = False` on the criterion if it is "
                            "a plain mean over the samples")  # fmt: skip
        if isinstance(leaf, PerSample):
            cut.append([leaf.at(places) for places in lanes.split(torch.arange(lanes.samples))])
        else:
            cut.append(lanes.split(leaf) if isinstance(leaf, Tensor) else [leaf] * len(lanes.sizes))
    return [tree_unflatten(list(shard), form) for shard in zip(*cut, strict=True)]


def handed_on(prepare: Prepare | None) -> Prepare:
    """`prepare` of a Feed that tells EachShard how the shards lie."""

    def prepared(inputs: Tensor, targets: Any, step: int, shards: tuple[int, ...], lanes: Lanes) -> tuple[Tensor, Any]:
        if prepare is not None:
            inputs, targets = prepare(inputs, targets, step, shards, lanes)
        return inputs, ShardTargets(targets, lanes) if lanes.shared else targets

    return prepared
