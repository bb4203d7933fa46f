"""What a forward may change that threads cannot have for themselves: generators, buffers, what modules keep in attributes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy
import torch
from torch import nn

from isobatch.runtime.trees import tensors
from isobatch.train.batch_norm import learning_layers

PLAIN = bool, int, float, complex, str, bytes, type(None)
TABLES = {"_parameters", "_buffers", "_modules"}  # of a module: what is in them is looked at by itself
WAY_OUT = "set threads=1, which runs one shard at a time with the same bits"


class Shared(Protocol):
    def changed(self) -> str | None:
        """What has been done to it since, in words that go on from "the model"; None: nothing."""


class Generators:
    """Those that all threads of a process share, as they are now. `host`: Python's and NumPy's too."""

    def __init__(self, host: bool):
        self.host = host
        self.states = self._states()

    def _states(self) -> list[Any]:
        found: list[Any] = [torch.default_generator.get_state()]
        if self.host:
            state: Any = numpy.random.get_state()
            found += [random.getstate(), (state[1].tobytes(), state[2:])]
        return found

    def changed(self) -> str | None:
        now = self._states()
        if not torch.equal(self.states[0], now[0]):
            return "draws random numbers in a way that is not seen (a C++ extension, say)"
        if self.states[1:] != now[1:]:
            return "draws from Python's or NumPy's generator, which all threads share"
        return None


class Buffers:
    """Those of `models` that threads share: all but the running statistics, which they have for themselves."""

    def __init__(self, *models: nn.Module):
        counted = {id(b) for model in models for layer in learning_layers(model) for b in layer.buffers(recurse=False)}
        self.owners = [(m, name, b, f"{prefix}.{name}".lstrip("."), b._version) for model in models
                       for prefix, m in model.named_modules()
                       for name, b in m._buffers.items() if b is not None and id(b) not in counted]  # fmt: skip

    def changed(self) -> str | None:
        for module, name, buffer, path, version in self.owners:
            if module._buffers.get(name) is not buffer or buffer._version != version:
                return f"changes the buffer {path} in its forward"
        return None


class GivenInputs:
    """Those of some micro batches, which an audit looks at when their shards have been run."""

    def __init__(self, trees: Sequence[Any]):
        self.tensors = [(tensor, tensor._version) for tree in trees for tensor in tensors(tree)]

    def changed(self) -> str | None:
        return "changes its inputs" if any(tensor._version != version for tensor, version in self.tensors) else None


class Attributes:
    """What the modules of a model, or a criterion of any kind, keep for themselves beside tensors that torch knows of."""

    def __init__(self, *things: Any):
        self.things = [
            (name, part)
            for thing in things
            for name, part in (thing.named_modules() if isinstance(thing, nn.Module) else [("the loss", thing)])
            if hasattr(part, "__dict__")
        ]
        self.values = [self._values(part) for _, part in self.things]

    @staticmethod
    def _values(part: Any) -> dict[str, Any]:
        return {key: (value, _inside(value)) for key, value in vars(part).items() if key not in TABLES}

    def changed(self) -> str | None:
        for (name, part), before in zip(self.things, self.values, strict=True):
            now = self._values(part)
            for key in {*before, *now}:
                if key not in before or key not in now or not _same(before[key], now[key]):
                    return f"keeps what a forward leaves in {name + '.' if name else ''}{key}"
        return None


def _inside(value: Any) -> Any:
    """The members of a container, which may be changed in place; a tensor's version."""
    if isinstance(value, torch.Tensor):
        return [value._version]
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | set | tuple) else []


def _same(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    (a, inside), (b, later) = before, now
    if a is not b and not (isinstance(a, PLAIN) and type(a) is type(b) and a == b):
        return False
    return len(inside) == len(later) and all(p is q or (isinstance(p, PLAIN) and p == q)
                                             for p, q in zip(inside, later, strict=True))  # fmt: skip
