"""No hook of the user's runs in what is only tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import module
from torch.optim import optimizer


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Hooks of all modules and all optimizers (torch's register_..._hook functions) are not there inside the block."""
    tables: list[dict[Any, Any]] = [
        table for place in (module, optimizer) for name, table in vars(place).items()
        if name.startswith("_global_") and isinstance(table, dict)
    ]  # fmt: skip
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)
