"""isobatch: you state the effective batch; the hardware plan is free."""

from __future__ import annotations

import importlib
from typing import Any

from isobatch.extend.registry import register
from isobatch.given import Sum

__all__ = ["ConfigError", "Result", "Sum", "load", "read", "register", "train"]
__version__ = "0.1.0"

# what is imported when it is asked for: `import isobatch` costs next to nothing (docs/python.md)
_LATER = {"ConfigError": "isobatch.errors", "Result": "isobatch.api", "load": "isobatch.api", "read": "isobatch.api"}


def __getattr__(name: str) -> Any:
    if name == "train":  # the room of this name can be called: see there
        return importlib.import_module("isobatch.train")
    if name not in _LATER:
        raise AttributeError(f"module 'isobatch' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
