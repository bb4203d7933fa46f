"""Which learning rate and weight decay each parameter has, and from which update on it is trained."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from isobatch.amounts import amount, updates
from isobatch.checks import within
from isobatch.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

KEYS = ("match", "lr", "lr_scale", "weight_decay", "frozen_until")


@dataclass(frozen=True)
class Decays:
    """Weight decay by the kind of a parameter; None: as the general rule has it."""

    norm: float | None = None
    bias: float | None = None
    embedding: float | None = None


@dataclass(frozen=True)
class Rule:
    """One entry of `optimizer.groups`: what parameters whose names match have of their own."""

    match: Sequence[str]
    own: Mapping[str, Any] = field(default_factory=dict)

    def means(self, name: str) -> bool:
        return any(fnmatch(name, pattern) or fnmatch(name, pattern + ".*") for pattern in self.match)


def rules(entries: Sequence[Any]) -> list[Rule]:
    """`optimizer.groups` checked.

    Raises:
        ConfigError: an entry that is none.
    """
    found = []
    for number, entry in enumerate(entries):
        where = f"optimizer.groups[{number}]"
        example = "write optimizer.groups=[{match: head, lr_scale: 10}]"
        if not isinstance(entry, Mapping) or not entry.get("match"):
            raise ConfigError(where, entry, "says not which parameters it is about (match)", example)
        for key in entry:
            if key not in KEYS:
                near = difflib.get_close_matches(str(key), KEYS, n=1) or KEYS
                raise ConfigError(f"{where}.{key}", entry[key], "is no option of a group", f"did you mean {', '.join(near)}")
        match = [entry["match"]] if isinstance(entry["match"], str) else list(entry["match"])
        own = {key: value for key, value in entry.items() if key != "match"}
        for key in ("lr", "lr_scale", "weight_decay"):
            if key in own:
                if isinstance(own[key], bool) or not isinstance(own[key], int | float):
                    raise ConfigError(f"{where}.{key}", own[key], "is no number", example)
                within(f"{where}.{key}", own[key], 0, 1e6)
        if "lr" in own and "lr_scale" in own:
            raise ConfigError(f"{where}.lr", own["lr"], "and lr_scale say the same", "leave one of them out")
        if "frozen_until" in own:
            own["frozen_until"] = amount(f"{where}.frozen_until", own["frozen_until"])
        found.append(Rule(match, own))
    return found


def kinds(model: nn.Module) -> dict[str, str]:
    """Name -> `norm`, `bias` or `embedding` of the parameters that are one: by the module that holds them, else by name."""
    from torch import nn
    from torch.nn.modules.batchnorm import _NormBase

    spared: Any = getattr(model, "no_weight_decay", set)()
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        is_norm = isinstance(module, _NormBase | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm) or "Norm" in type(module).__name__
        for key, p in module.named_parameters(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            if is_norm and p.ndim <= 1:
                found[name] = "norm"
            elif key == "bias":
                found[name] = "bias"
            elif isinstance(module, nn.Embedding) or any(fnmatch(name, pattern) for pattern in spared):
                found[name] = "embedding"
    return found


def param_groups(model: nn.Module, lr: float, weight_decay: float, small_too: bool, decays: Decays,
                 given: Sequence[Rule]) -> list[dict[str, Any]]:  # fmt: skip
    """The optimizer's groups, by weight decay from the lowest.

    Without decay: biases, all of one dimension (unless `small_too`), and what the model itself names in `no_weight_decay()`.
    A later rule of `given` wins over an earlier one.

    Raises:
        ConfigError: a rule that matches no parameter.
    """
    spared: Any = getattr(model, "no_weight_decay", set)()
    kind = kinds(model) if decays != Decays() else {}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, p in trained:
        small = not small_too and (p.ndim <= 1 or name.endswith(".bias"))
        free = small or any(fnmatch(name, pattern) for pattern in spared)
        decay = 0.0 if free else weight_decay
        by_kind = getattr(decays, kind[name]) if name in kind else None
        own: dict[str, Any] = {"weight_decay": decay if by_kind is None else by_kind}
        for rule in given:
            if rule.means(name):
                if rule.own.keys() & {"lr", "lr_scale"}:  # each says the rate, and the later one holds
                    own = {key: value for key, value in own.items() if key not in ("lr", "lr_scale")}
                own |= rule.own
        scale = own.pop("lr_scale", None)
        if scale is not None:
            own["lr"] = lr * scale
        key = own["weight_decay"], *(f"{k}={own[k]}" for k in ("lr", "frozen_until") if k in own)
        groups.setdefault(key, {"params": [], **own})["params"].append(p)
    for number, rule in enumerate(given):
        if not any(rule.means(name) for name, _ in trained):
            raise ConfigError(f"optimizer.groups[{number}].match", ", ".join(rule.match), "matches no trained parameter",
                              f"take some of {', '.join(_tops(name for name, _ in trained))}")  # fmt: skip
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0], key[1:]))]


def held_until(optimizer: torch.optim.Optimizer, total: int, per_epoch: int) -> list[tuple[int, list[nn.Parameter]]]:
    """(first update, parameters) of the groups that are not trained from the start."""
    return [(updates(group["frozen_until"], total, per_epoch), group["params"]) for group in optimizer.param_groups
            if "frozen_until" in group]  # fmt: skip


def _tops(names: Iterator[str]) -> list[str]:
    return sorted({name.split(".")[0] for name in names})[:12]
