"""Every group with its table: the only road from a name in a config to a class."""

from __future__ import annotations

from typing import Any

from isobatch import (
    accumulation,
    augment,
    checkpoint,
    data,
    ema,
    logger,
    loss,
    model,
    optimizer,
    parallel,
    precision,
    reduction,
    sampler,
    scheduler,
)

TABLES: dict[str, dict[str, Any]] = {
    "parallel": parallel.TABLE,
    "precision": precision.TABLE,
    "sampler": sampler.TABLE,
    "accumulation": accumulation.TABLE,
    "reduction": reduction.TABLE,
    "data": data.TABLE,
    "augment": augment.TABLE,
    "model": model.TABLE,
    "loss": loss.TABLE,
    "optimizer": optimizer.TABLE,
    "scheduler": scheduler.TABLE,
    "ema": ema.TABLE,
    "checkpoint": checkpoint.TABLE,
    "logger": logger.TABLE,
}
