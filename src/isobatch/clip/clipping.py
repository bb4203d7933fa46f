"""What is done with a window's gradient before the update: the same tensors on every rank, so no collective and no branch."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class State(Protocol):
    """What is clipped: the training state. `update`: updates that have been applied."""

    parameters: list[nn.Parameter]
    update: int

    def clip_gradients(self, max_norm: float | None) -> Tensor: ...


class Clipping:
    """Leaves the gradient alone, and tells its norm where somebody asks.

    `active`: it has to be called at every update, not only where the norm is logged.
    """

    active = False

    def __call__(self, state: State) -> Tensor:
        """Norm of the gradient over all parameters as it was, 0-d."""
        norm = state.clip_gradients(None)
        self.clip(state.parameters)
        return norm

    def clip(self, parameters: list[nn.Parameter]) -> None:
        pass


class NormClipping(Clipping):
    active = True

    def __init__(self, max_norm: float):
        self.max_norm = max_norm

    def __call__(self, state: State) -> Tensor:
        return state.clip_gradients(self.max_norm)


class ValueClipping(Clipping):
    active = True

    def __init__(self, max_value: float):
        self.max_value = max_value

    def clip(self, parameters: list[nn.Parameter]) -> None:
        torch.nn.utils.clip_grad_value_(parameters, self.max_value)


class AdaptiveClipping(Clipping):
    active = True

    def __init__(self, factor: float, eps: float, spared: set[nn.Parameter]):
        from isobatch.runtime.timm_import import timm

        self.function, self.factor, self.eps, self.spared = timm.utils.agc.adaptive_clip_grad, factor, eps, spared

    def clip(self, parameters: list[nn.Parameter]) -> None:
        self.function([p for p in parameters if p not in self.spared], self.factor, self.eps)


class HeldBack(Clipping):
    """Parameters that are trained only from some update on: until then their gradient is dropped, and nothing changes them."""

    active = True

    def __init__(self, inner: Clipping, held: list[tuple[int, list[nn.Parameter]]]):
        self.inner, self.held = inner, held

    def __call__(self, state: State) -> Tensor:
        for until, members in self.held:
            if state.update < until:
                for p in members:
                    p.grad = None
        return self.inner(state)


def held_back(clipping: Clipping, held: list[tuple[int, list[nn.Parameter]]]) -> Clipping:
    """`clipping`, and before it the gradients of `held` (first update, parameters) are dropped as long as it takes."""
    return HeldBack(clipping, held) if held else clipping


def head_of(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of the classifier: what timm calls it, else the last module that has weights of its own."""
    get: Any = getattr(model, "get_classifier", None)
    found = get() if get is not None else [m for m in model.modules() if list(m.parameters(recurse=False))][-1]
    heads = list(found) if isinstance(found, tuple | list | nn.ModuleList) else [found]
    return {p for head in heads if isinstance(head, nn.Module) for p in head.parameters()}
