"""`isobatch.register`: how your own models, datasets, losses, ... join the groups' tables.

A module that calls it is named in `imports=[...]`, typed by a person on the command line or in their conf/; no config that
is read from a run, a checkpoint or a server can bring code in.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

# every group: a folder of conf/, and a module of its name here with TABLE and MARKS
GROUPS = ("parallel", "precision", "sampler", "accumulation", "reduction", "data", "augment", "model", "loss", "optimizer",
          "scheduler", "ema", "clip", "stop", "metrics", "checkpoint", "audit", "logger", "writer", "debug",
          "profile")  # fmt: skip
PARTS = {"collate": ("isobatch.extend.custom", "COLLATES"), "metric": ("isobatch.metrics", "OWN")}  # no groups: module, table
_OURS: dict[str, dict[str, Any]] = {}  # the tables as this package filled them


def register(group: str, name: str, obj: T | None = None) -> Any:
    """Enter `obj` into the table of `group` under `name`; without `obj`, a decorator.

    Args:
        obj: an options dataclass as the group's own are, in any group. Or a plain function or class, for

            model: `f(num_classes, in_chans, **kwargs) -> nn.Module`
            data: `f(split, **kwargs)`, split "train" or "eval" -> a dataset: len(), [i] -> (input, target)
            loss: `f(**kwargs)` -> a criterion: (output, target) -> mean over the samples, or isobatch.Sum(total, count) over
                elements, or a mapping of `loss` and named numbers, which are logged as train/<name>
            collate: `f(samples)`, a list of (input, target) -> (inputs, targets) of a batch (data.collate)
            metric: `f(outputs, targets, **kwargs)` -> number, or name -> number, of all samples in their order; or a class like
                torchmetrics' (metrics.names)
            sampler: `f(epoch, n, seed, **kwargs)` -> order of the epoch, a list or tensor of indices below n
            writer: `f(folder, about, **kwargs)` -> an object with write(answered) and close() (isobatch/writer.py)

            whose options are then group.kwargs (conf/<group>/custom.yaml).
    Returns:
        obj.
    Raises:
        KeyError: no such group. ValueError: the name is one of isobatch's own. TypeError: a plain object in another group.
    """
    if obj is None:
        return lambda found: register(group, name, found)
    if group in PARTS:
        place, name_of_table = PARTS[group]
        known: dict[str, Any] = getattr(importlib.import_module(place), name_of_table)
        if not callable(obj):
            raise TypeError(f"{group}={name}: {obj!r} is not callable")
        known[name] = obj
        return obj
    if group not in GROUPS:
        raise KeyError(f"no group {group!r}; there are {', '.join((*GROUPS, *PARTS))}")
    table: dict[str, Any] = importlib.import_module(f"isobatch.{group}").TABLE
    ours = _OURS.setdefault(group, dict(table))
    if name in ours:
        raise ValueError(f"{group}={name} is isobatch's own; register yours under another name")
    table[name] = obj if _is_options(obj) else _wrapped(group, name, obj)
    return obj


def _is_options(obj: Any) -> bool:
    return isinstance(obj, type) and dataclasses.is_dataclass(obj) and any(f.name == "name" for f in dataclasses.fields(obj))


def _wrapped(group: str, name: str, obj: Callable[..., Any]) -> type:
    from isobatch.extend import custom

    base = custom.BASES.get(group)
    if base is None:
        raise TypeError(f"{group} takes an options dataclass with a field `name`, as in isobatch/{group}; a plain function "
                        f"or class works for {', '.join(sorted(custom.BASES))}")  # fmt: skip
    if not callable(obj):
        raise TypeError(f"{group}={name}: {obj!r} is not callable")
    return type(f"Custom_{name}", (base,), {"factory": staticmethod(obj), "__doc__": obj.__doc__})
