"""Training and evaluation mode, module by module: frozen layers are in another one than the model around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Whatever mode the modules get inside, they have their own again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
