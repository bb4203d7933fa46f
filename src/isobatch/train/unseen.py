"""What a forward may change that threads cannot have for themselves: generators, buffers, what modules keep in attributes."""

from __future__ import annotations

import random
import types
import warnings
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Protocol

import numpy
import torch
from torch import nn

from isobatch.runtime.trees import tensors
from isobatch.train.batch_norm import learning_layers

PLAIN = bool, int, float, complex, str, bytes, type(None)
TABLES = {"_parameters", "_buffers", "_modules"}  # of a module: what is in them is looked at by itself
AS_THEY_ARE = nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType
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
    """What the modules of a model, or a criterion of any kind, keep for themselves beside tensors that torch knows of; of a
    criterion its buffers too, which `Buffers` does not look at."""

    def __init__(self, model: nn.Module, criterion: Any):
        parts = [*model.named_modules()]
        self.tables = {id(part): TABLES for _, part in parts}
        inner = criterion.named_modules() if isinstance(criterion, nn.Module) else [("", criterion)]
        self.things = [*parts, *((f"the loss.{name}".rstrip("."), part) for name, part in inner if hasattr(part, "__dict__"))]
        self.values = [self._values(part) for _, part in self.things]

    def _values(self, part: Any) -> dict[str, Any]:
        left_out = self.tables.get(id(part), TABLES - {"_buffers"})
        return {key: (value, Reached(value).digest) for key, value in vars(part).items() if key not in left_out}

    def changed(self) -> str | None:
        for (name, part), before in zip(self.things, self.values, strict=True):
            now = self._values(part)
            for key in {*before, *now}:
                if key not in before or key not in now or not _same(before[key], now[key]):
                    return f"keeps what a forward leaves in {name + '.' if name else ''}{key}"
        return None


def _same(before: tuple[Any, bytes], now: tuple[Any, bytes]) -> bool:
    (a, inside), (b, later) = before, now
    if isinstance(a, PLAIN):
        return type(a) is type(b) and bool(a == b or a is b)
    return a is b and inside == later


class Reached:
    """All that can be reached from `value`, however deep: a list in a dict, an object's attributes, a counter, a generator.

    Attributes:
        digest: another one when anything of it has been changed in place. Functions and classes count as they are, modules
            too (each is looked at by itself).
        tensors: that were met.
    """

    def __init__(self, value: Any):
        self.tensors: list[torch.Tensor] = []
        found, todo, seen = blake2b(), [value], {}  # type: ignore[var-annotated]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, which can be taken apart up to Python 3.13
            while todo:
                thing = todo.pop()
                if isinstance(thing, PLAIN):
                    found.update(thing if isinstance(thing, bytes) else f"{thing!r},".encode())
                    continue
                told, members = (b"", []) if id(thing) in seen else self._apart(thing)
                number, _ = seen.setdefault(id(thing), (len(seen), thing))  # kept: its id is nobody else's meanwhile
                found.update(f"{type(thing).__name__} {number} {len(members)}".encode() + told)
                todo += members
        self.digest = found.digest()

    def _apart(self, thing: Any) -> tuple[bytes, list[Any]]:
        """(what it says of itself, what else is in it)."""
        name = str(id(thing)).encode()
        if isinstance(thing, torch.Tensor):
            self.tensors.append(thing)
            return name + b" %d" % thing._version, []
        if isinstance(thing, torch.Generator):
            return thing.get_state().numpy().tobytes(), []
        if isinstance(thing, AS_THEY_ARE):
            return name, []
        if isinstance(thing, dict | list | tuple | set | frozenset) and not hasattr(thing, "__dict__"):
            return b"", [*thing, *(thing.values() if isinstance(thing, dict) else ())]
        try:
            reduced = thing.__reduce_ex__(4)
        except Exception:  # a lock, say
            return name, [getattr(thing, "__dict__", None)]
        if isinstance(reduced, str):
            return name, []
        return b"", [*reduced[:3], *(list(more or ()) for more in reduced[3:5])]
