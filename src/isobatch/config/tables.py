"""Every group with its table: the only road from a name in a config to a class."""

from __future__ import annotations

import importlib
from typing import Any

from isobatch.extend.registry import GROUPS
from isobatch.marks import Marks

_MODULES = {group: importlib.import_module(f"isobatch.{group}") for group in GROUPS}
TABLES: dict[str, dict[str, Any]] = {group: module.TABLE for group, module in _MODULES.items()}
MARKS: dict[str, Marks] = {group: module.MARKS for group, module in _MODULES.items()}
