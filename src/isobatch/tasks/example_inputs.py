"""What a model is traced on and compared by: samples of its own data set where one can be read, else drawn numbers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from isobatch.config import Config
from isobatch.data import DataInfo
from isobatch.data.device import ToDevice
from isobatch.data.samples import HostBatch
from isobatch.errors import ConfigError
from isobatch.runtime.trees import PerSample, Tree, arguments, mapped, tensors

log = logging.getLogger("isobatch")


class ExampleInputs:
    """Inputs of any batch size, the same at every call.

    Args:
        info: of the data; its shape is enough to draw floats.
        read: a batch of so many samples of the data set instead, as the model takes them.
    """

    def __init__(self, info: DataInfo, read: Callable[[int], Tree] | None = None):
        self.info, self.read = info, read

    def __call__(self, batch: int) -> Tree:
        """One tensor (batch, *shape), or a tree of such."""
        if self.read is not None:
            return self.read(batch)
        return torch.randn(batch, *self.info.shape, generator=torch.Generator().manual_seed(batch))

    @property
    def one(self) -> bool:
        """Whether an input is a tensor of floats, as of images."""
        example = self(1)
        return isinstance(example, Tensor) and example.is_floating_point()

    def described(self) -> Tree:
        """Shape and dtype of every leaf, in the inputs' own form."""
        return forms(self(1))


def of(config: Config, info: DataInfo) -> ExampleInputs:
    """Those of `config.data` where it is one of the user's own: what it gives, and of which form, only it can say.

    Raises:
        ConfigError: an input holds something that is no tensor.
    """
    own = getattr(config.data, "examples", None)
    if own is None:
        return ExampleInputs(info)
    try:
        samples, to_device = own(config.seed), ToDevice(torch.device("cpu"), info, False)
        found = ExampleInputs(info, lambda batch: to_device(HostBatch(samples(batch), (), []))[0])
        example = found(1)
    except Exception as problem:  # a data set that is not here: floats of the recorded shape may do
        log.info("export: data=%s cannot be read (%s: %s): inputs are drawn as numbers", config.data.name,
                 type(problem).__name__, " ".join(str(problem).split())[:200])  # fmt: skip
        return ExampleInputs(info)
    if other := next((leaf for leaf in tree_leaves(example) if not isinstance(leaf, Tensor)), None):
        said = "text" if isinstance(other, PerSample) else type(other).__name__
        raise ConfigError("task", "export", f"the inputs of data={config.data.name} hold {said}, and an exported program takes "
                          "tensors alone", "make tensors of it in the data set")  # fmt: skip
    return found


def forms(tree: Tree) -> Tree:
    """Shape and dtype of every leaf of a batch, in the tree's own form."""
    return mapped(lambda leaf: {"shape": ["batch", *leaf.shape[1:]], "dtype": str(leaf.dtype).removeprefix("torch.")}, tree)


def bound(model: nn.Module, inputs: Tree) -> dict[str, Any]:
    """The inputs by the parameters of the model that they go to, in the order of these."""
    positional, named = arguments(inputs)
    return inspect.signature(model.forward).bind(*positional, **named).arguments


def spell_out(model: nn.Module, inputs: Tree) -> None:
    """Give a model that takes anything (`*x`, `**x`) a parameter for each of these inputs: torch 2.14 writes a program for
    other ones that fails when it is called."""
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in parameters):
        return
    positional, named = arguments(inputs)
    called = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    names = [*(f"input_{k}" for k in range(len(positional))), *named]
    made = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    forward.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    model.forward = forward  # type: ignore[method-assign]


def ordered(model: nn.Module, inputs: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`arguments`; those by name in the order of the model's parameters, which is that of an exported program."""
    positional, named = arguments(inputs)
    order = {key: k for k, key in enumerate(bound(model, inputs))}
    return positional, dict(sorted(named.items(), key=lambda pair: order.get(pair[0], len(order))))


def names_of(model: nn.Module, inputs: Tree) -> list[str]:
    """A name for each leaf in order: the parameter that it goes to, and its place in there."""
    paths, _ = tree_flatten_with_path(bound(model, inputs))
    return ["_".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path) for path, _ in paths]


def free_batch(model: nn.Module, inputs: Tree) -> Any:
    """What torch.export calls dynamic_shapes: the first dimension of every leaf is the batch, any number."""
    batch = torch.export.Dim("batch", min=1)
    collection = torch.export.ShapesCollection()
    for leaf in tensors(inputs):
        collection[leaf] = {0: batch}
    positional, named = ordered(model, inputs)
    return collection.dynamic_shapes(model, positional, named)
