"""Which parameters get no gradient: what DDP has to know before it reduces for the first time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.runtime.accelerator import kept_generators
from isobatch.runtime.trees import Tree, call, first, mapped


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of a model's output (a tensor; lists, tuples, dicts of outputs), in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict | list | tuple):
        for part in output.values() if isinstance(output, dict) else output:
            yield from tensors_in(part)


def without_gradient(model: nn.Module, inputs: Tree) -> list[bool]:
    """For each trainable parameter of `model`, whether a backward from its output on `inputs` would miss it.

    One forward on at most two samples, without a trace: generators, buffers and gradients stay as they were. No
    backward; the graph is walked. Reentrant checkpointing hides parameters from it: then none counts as missed.

    Args:
        inputs: (N, ...), as the model gets them in training.
    """
    parameters = trainable(model)
    with unnoticed(model, inputs):
        output = call(model, mapped(lambda t: t[:2], inputs))
    found, opaque = _reached(output)
    return [not opaque and id(p) not in found for p in parameters]


@contextmanager
def unnoticed(model: nn.Module, inputs: Tree) -> Iterator[None]:
    """Leave generators and buffers as they were, whatever is run inside (with gradients, on the device of `inputs`)."""
    buffers = list(model.buffers())
    before = [b.detach().clone() for b in buffers]
    # uncompiled: two samples would leave a graph for another batch size behind
    with kept_generators([first(inputs).device]), torch.compiler.set_stance("force_eager"), torch.enable_grad():
        yield
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def _reached(output: Any) -> tuple[set[int], bool]:
    """(ids of the parameters that a backward from `output` would reach, whether part of the graph cannot be seen)."""
    open_nodes = [t.grad_fn for t in tensors_in(output) if t.grad_fn is not None]
    seen, found = set(open_nodes), set()
    while open_nodes:
        node: Any = open_nodes.pop()
        if "CheckpointFunction" in node.name():
            return set(), True
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                open_nodes.append(following)
    return found, False
