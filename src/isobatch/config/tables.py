"""Every group with its table: the only road from a name in a config to a class."""

from __future__ import annotations

from typing import Any

from isobatch import (
    accumulation,
    audit,
    augment,
    checkpoint,
    clip,
    data,
    debug,
    ema,
    logger,
    loss,
    metrics,
    model,
    optimizer,
    parallel,
    precision,
    profile,
    reduction,
    sampler,
    scheduler,
    stop,
    writer,
)
from isobatch.marks import Marks

_MODULES = {
    "parallel": parallel,
    "precision": precision,
    "sampler": sampler,
    "accumulation": accumulation,
    "reduction": reduction,
    "data": data,
    "augment": augment,
    "model": model,
    "loss": loss,
    "optimizer": optimizer,
    "scheduler": scheduler,
    "ema": ema,
    "clip": clip,
    "stop": stop,
    "metrics": metrics,
    "checkpoint": checkpoint,
    "audit": audit,
    "logger": logger,
    "writer": writer,
    "debug": debug,
    "profile": profile,
}
GROUPS = tuple(_MODULES)
TABLES: dict[str, dict[str, Any]] = {group: module.TABLE for group, module in _MODULES.items()}
MARKS: dict[str, Marks] = {group: module.MARKS for group, module in _MODULES.items()}
