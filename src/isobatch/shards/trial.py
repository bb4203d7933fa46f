"""Can this model run several shards in one forward? Tried before training: a forward of all against one of each alone.

Apart keeps what it knows of: torch's random functions and batch norms. A model may couple the samples of a forward in other
ways (statistics of its own, a draw for all at once, an extension that draws). So the outputs of every module are compared
with those for a shard alone: a coupling shows where it happens, even where a gate or a scale of nearly zero hides it later.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from isobatch.runtime.accelerator import generator, kept_generators
from isobatch.runtime.randomness import isolated_generators, seed_host
from isobatch.runtime.trees import Tree, call, first, mapped
from isobatch.shards.apart import Apart
from isobatch.shards.layout import Layout
from isobatch.shards.streams import NotApart, Streams

# largest difference that is taken for rounding, relative to the largest value of the tensor
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 2e-2}
MOST = 3  # shards of a forward that are looked at alone
ELEMENTS = 4096  # of a tensor that are looked at, evenly spread

Place = tuple[str, int, int]  # a module's name, how often it was called before, which of its output's tensors


class Findings(NamedTuple):
    """`coupling`: why a model cannot run shards together, in words that go on from "the model"; None: it can.

    `apart`: it draws, or normalises over samples, so that its shards have to be kept apart.
    """

    coupling: str | None
    apart: bool


# modules whose samples meet in nothing, in a norm, or draw alone; of exactly these types
ALONE = nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LayerNorm
APART = nn.BatchNorm1d, nn.BatchNorm2d, nn.Dropout


def known(model: nn.Module) -> Findings | None:
    """What need not be tried, because `model` is made of well-known layers alone; None: it has to be."""
    types = {type(module) for module in model.modules()}
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return None if hooked or types - {*ALONE, *APART} else Findings(None, bool(types & {*APART}))


def examine(model: nn.Module, samples: Tree, layouts: Iterable[Layout], device: torch.device) -> Findings:
    """Try it. Nothing is left behind: not in the model's buffers, nor in any generator.

    Args:
        model: in training mode, on `device`.
        samples: (n, ...) different inputs, of which batches are made up.
        layouts: of every kind of forward that the training will have.
    """
    used = False
    with unnoticed(model, device), torch.no_grad():
        for layout in layouts:
            trial = SharedForward(model, samples, layout, device)
            try:
                reason = trial.reason()
            except NotApart as problem:
                reason = str(problem)
            used |= trial.apart.used
            if reason is not None:
                return Findings(reason, used)
    return Findings(None, used)


class SharedForward:
    """One forward of all shards of `layout`, held against forwards of single shards."""

    def __init__(self, model: nn.Module, samples: Tree, layout: Layout, device: torch.device):
        self.model, self.layout, self.device = model, layout, device
        # drawn, so that no two shards hold the same samples: their statistics would be the same
        order = torch.randint(len(first(samples)), (layout.samples,), generator=torch.Generator().manual_seed(layout.samples))
        self.batch = mapped(lambda t: t[order.to(t.device)], samples)
        self.shards = sorted({round(i * (len(layout.sizes) - 1) / (MOST - 1)) for i in range(MOST)})
        self.buffers = [(b, b.clone()) for b in model.buffers()]
        self.apart = Apart([Streams(layout, device, list(range(len(layout.sizes))), 0)])

    def reason(self) -> str | None:
        alone = {shard: self._alone(shard, self._part(shard)) for shard in self.shards}
        for place, found in self._together().items():
            for shard, part in found.items():
                off = _distance(part, alone[shard][place]) if place in alone[shard] else 0.0
                if off > TOLERANCE[part.dtype]:
                    name = f"module {place[0]}" if place[0] else "its output"
                    return f"couples the samples of a forward ({name} is {off:.1g} off for a shard among others)"
        return None

    def _part(self, shard: int) -> Tree:
        return mapped(lambda t: self.layout.split(t)[shard], self.batch)

    def _alone(self, shard: int, inputs: Tree) -> dict[Place, Tensor]:
        self._restore()
        for drawn_from in {generator(self.device), torch.default_generator}:
            drawn_from.manual_seed(shard)
        seed_host(shard)
        found: dict[Place, Tensor] = {}
        with outputs(self.model, lambda place, tensor: found.__setitem__(place, _spread(tensor))):
            call(self.model, inputs)
        return found

    def _together(self) -> dict[Place, dict[int, Tensor]]:
        self._restore()
        found: dict[Place, dict[int, Tensor]] = {}
        host = random.getstate(), repr(numpy.random.get_state())
        self.apart.begin()
        with self.apart, outputs(self.model, lambda place, tensor: found.__setitem__(place, self._parts(tensor))):
            output = call(self.model, self.batch)
        self.apart.check()
        if host != (random.getstate(), repr(numpy.random.get_state())):
            raise NotApart("draws from Python's or NumPy's generator, which is one for all shards")
        for tensor in _tensors(output):
            if not tensor.ndim or not self.layout.rows(len(tensor)):
                raise NotApart(f"gives {tuple(tensor.shape)} numbers for {self.layout.samples} samples together")
        return found

    def _restore(self) -> None:
        for buffer, value in self.buffers:
            buffer.copy_(value)

    def _parts(self, whole: Tensor) -> dict[int, Tensor]:
        """Of the shards that are looked at; {} where `whole` has not so many rows for each sample."""
        for dim in (0, 1):
            if whole.ndim > dim and self.layout.rows(whole.shape[dim]):
                parts = self.layout.split(whole.transpose(0, dim))
                return {shard: _spread(parts[shard].transpose(0, dim)) for shard in self.shards}
        return {}


def _spread(tensor: Tensor) -> Tensor:
    """Some of its elements: a coupling concerns nearly all of them, and all activations may be too many to keep."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // ELEMENTS)].clone()


def _distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    if found.shape != expected.shape or not found.numel():
        return 0.0  # rows of something else, by chance as many: its parts are seen where they are used
    finite = found.isfinite() & expected.isfinite()
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return float("inf")
    scale = expected.where(finite, 0).abs().max()
    return float((found - expected).where(finite, 0).abs().max() / scale) if scale else 0.0


@contextmanager
def outputs(model: nn.Module, take: Any) -> Iterator[None]:
    """`take(place, tensor)` for each tensor of floating-point numbers that a module of `model` returns."""
    calls: dict[str, int] = {}

    def hook(name: str) -> Any:
        def returned(module: nn.Module, args: Any, output: Any) -> None:
            calls[name] = calls.get(name, -1) + 1
            for i, tensor in enumerate(_tensors(output)):
                if tensor.dtype in TOLERANCE:
                    take((name, calls[name], i), tensor)

        return returned

    hooks = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


@contextmanager
def unnoticed(model: nn.Module, device: torch.device) -> Iterator[None]:
    before = [(b, b.detach().clone()) for b in model.buffers()]
    with isolated_generators(), kept_generators([device]):
        yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)
