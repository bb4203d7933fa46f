"""Batches of any form: a tensor, or tensors and whatever else in tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

Tree = Any  # of tensors, and of leaves that are none


class PerSample(list[Any]):
    """What each sample of a batch has that is no tensor (a name, a text): one leaf, cut where the tensors are cut."""

    def at(self, places: Tensor) -> PerSample:
        return PerSample(self[i] for i in places.tolist())


def call(module: Callable[..., Any], inputs: Tree) -> Any:
    """`module(x)`; with the members of a plain tuple as its arguments, with those of a dict by their names."""
    if isinstance(inputs, Tensor):
        return module(inputs)
    positional, named = arguments(inputs)
    return module(*positional, **named)


def arguments(inputs: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model is called with: (positional arguments, those by name)."""
    if type(inputs) is tuple:
        return inputs, {}
    return ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})


def mapped(change: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """`tree` with every tensor changed."""
    return change(tree) if isinstance(tree, Tensor) else tree_map_only(Tensor, change, tree)


def repeated(tree: Tree, times: int) -> Tree:
    """A batch of one sample as one of `times` like it."""

    def more(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.repeat(times, *[1] * (leaf.ndim - 1))
        return PerSample(leaf * times) if isinstance(leaf, PerSample) else leaf

    return tree_map(more, tree)


def tensors(tree: Tree) -> list[Tensor]:
    return [tree] if isinstance(tree, Tensor) else [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def first(tree: Tree) -> Tensor:
    """Its first tensor.

    Raises:
        TypeError: it holds none.
    """
    if found := tensors(tree):
        return found[0]
    raise TypeError(f"there is no tensor in a {type(tree).__name__}")
