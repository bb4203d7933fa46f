"""Parts of a model that keep their weights (`model.freeze`): finetuning from some layer on, linear probing; how a new
classifier begins."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from isobatch.errors import ConfigError
from isobatch.train.batch_norm import keep_statistics, tracking_layers

BACKBONE = "backbone"  # the word for everything but the classifier, where nothing of the model has that name


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze what `patterns` name: parameters get no gradient, so no optimizer state, decay or update either, and layers
    with running statistics normalise with those and keep them.

    A pattern is compared with the names of parameters and of the modules that hold them: `layer1`, `blocks.[0-5]`,
    `*.bias`. `backbone` is everything but the classifier.

    Raises:
        ConfigError: a pattern that names nothing.
    """
    names = [name for name, _ in model.named_parameters()]
    tracking = {id(layer) for layer in tracking_layers(model)}
    layers = {f"{name}.running_mean": layer for name, layer in model.named_modules() if id(layer) in tracking}
    for pattern in patterns:
        chosen = {name for name in (*names, *layers) if matches(name, pattern)}
        if pattern == BACKBONE and not chosen:
            head = classifier(model)
            chosen = {name for name in (*names, *layers) if not any(matches(name, part) for part in head)}
        if not chosen:
            tops = sorted({name.split(".")[0] for name in names})
            raise ConfigError("model.freeze", pattern, "names no parameter of this model",
                              f"set model.freeze to some of backbone, {', '.join(tops[:12])}")  # fmt: skip
        for name, parameter in model.named_parameters():
            if name in chosen:
                parameter.requires_grad_(False)
        for name, layer in layers.items():
            if name in chosen:
                keep_statistics(layer)


def matches(name: str, pattern: str) -> bool:
    """Whether `pattern` means the parameter `name` or a module that holds it."""
    return fnmatch(name, pattern) or fnmatch(name, pattern + ".*")


def classifier(model: nn.Module) -> list[str]:
    """Names of the classifier's modules: what timm calls it, else the last module that has weights of its own."""
    get: Any = getattr(model, "get_classifier", None)
    if get is not None:
        found = get()
        heads = list(found) if isinstance(found, tuple | list | nn.ModuleList) else [found]
    else:
        heads = [m for m in model.modules() if list(m.parameters(recurse=False))][-1:]
    return [name for name, module in model.named_modules() if any(module is head for head in heads)]


def begin_head(model: nn.Module, scale: float | None, bias: float | None) -> None:
    """Multiply the classifier's first weights and biases with `scale`, then begin its biases with `bias` (None: as drawn)."""
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, parameter in (pair for head in classifier(model) for pair in modules[head].named_parameters()):
            if scale is not None:
                parameter.mul_(scale)
            if bias is not None and name.endswith("bias"):
                parameter.fill_(bias)


def describe(model: nn.Module) -> str:
    """How much of the model is trained, where it is not all of it; else empty."""
    every = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return "" if trained == every else f"{trained:,} of {every:,} weights are trained, the rest is frozen"
