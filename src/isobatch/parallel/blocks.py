"""What of a model is gathered at a time when it is sharded: its blocks, as it lists them itself."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from isobatch.errors import ConfigError
from isobatch.train.batch_norm import tracking_layers

LISTS = nn.Sequential, nn.ModuleList
MOST = 0.8  # of an item's weights in lists of its own: then it is a stage, and those are the blocks
LEAST = 0.01  # of the model's weights: a smaller block is not worth a message of its own


def choose_blocks(model: nn.Module, asked: Any, called: dict[str, int]) -> list[str]:
    """Names of the modules to gather one at a time, inner ones before those that hold them.

    Args:
        asked: `auto`, or names in which `*` stands for any one part.
        called: name -> how often one forward called it. Blocks are told by being called: what is called never or several
            times stays with the rest of the model.

    Raises:
        ConfigError: a name that fits no module, or one that the forward does not call once.
    """
    modules = dict(model.named_modules())
    if asked == "auto":
        total = _size(model)
        found = [name for name, module in items(model) if called.get(name) == 1 and _size(module) >= LEAST * total]
        return found if len(found) > 1 else []
    chosen: set[str] = set()
    for pattern in asked:
        fitting = [name for name, m in modules.items() if name and _fits(name, pattern) and _size(m)]
        if not fitting:
            near = ", ".join(name for name, _ in items(model))[:80] or "none"
            raise ConfigError("parallel.blocks", pattern, "names no module with weights", f"its blocks are {near}")
        for name in fitting:
            if called.get(name) != 1:
                raise ConfigError("parallel.blocks", name, "is not called once in a forward",
                                  "leave it out, or set parallel.blocks=auto")  # fmt: skip
        chosen.update(fitting)
    return sorted((name for name in modules if name in chosen), key=lambda name: -name.count("."))


def items(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of what nn.Sequential and nn.ModuleList list, in the model's order; a stage's blocks, not the stage."""
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(child, LISTS) or not isinstance(module, LISTS):
            yield from items(child, where)
            continue
        inner = list(items(child, where))
        if inner and sum(_size(m) for _, m in inner) > MOST * _size(child):
            yield from inner
        elif _size(child):
            yield where, child


def largest_pieces(model: nn.Module, asked: Any, let_go: bool) -> tuple[int, int]:
    """(bytes of weights, bytes of gradients) that are whole at a time, at most.

    Two blocks (the next one is gathered while one computes) and the rest of the model, or all weights without `let_go`;
    the gradients of one block, or of the rest.
    """
    total = sum(p.nbytes for p in model.parameters())
    names = choose_blocks(model, asked, dict.fromkeys(dict(model.named_modules()), 1))
    sizes = sorted((sum(p.nbytes for p in model.get_submodule(name).parameters()) for name in names), reverse=True)
    rest = total - sum(sizes)
    return (rest + sum(sizes[:2]) if let_go else total), max([rest, *sizes[:1]])


def gathered_pieces(model: nn.Module, asked: Any, dtype: torch.dtype | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """(bytes as they are gathered, collectives) of what is in no block, and of all blocks.

    Args:
        dtype: that weights are gathered in, but for layers with running statistics; None: their own.
    """
    apart = dtype is not None or len({p.dtype for p in model.parameters()}) > 1
    own = {id(p) for layer in tracking_layers(model) for p in layer.parameters()} if apart else set()
    names = choose_blocks(model, asked, dict.fromkeys(dict(model.named_modules()), 1))
    seen: set[int] = set()
    found = []
    for module in (*(model.get_submodule(name) for name in names), model):
        mine = [p for p in module.parameters() if id(p) not in seen]
        seen.update(id(p) for p in mine)
        nbytes = sum(p.nbytes if dtype is None or id(p) in own else p.numel() * dtype.itemsize for p in mine)
        # layers that keep their dtype among others go in a message of their own
        found.append((nbytes, len({id(p) in own for p in mine})))
    *blocks, rest = found
    return rest, (sum(nbytes for nbytes, _ in blocks), sum(count for _, count in blocks))


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _fits(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
