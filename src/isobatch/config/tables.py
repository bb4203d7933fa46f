"""Every group with its table: the only road from a name in a config to a class."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from isobatch.extend.registry import GROUPS
from isobatch.marks import Marks


class OfGroups(Mapping[str, Any]):
    """Group -> what its module calls `name`. The module is imported when that is asked for: composing needs the groups'
    names alone, and their 150 dataclasses are a sixth of a start that only shows or refuses something.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, group: str) -> Any:
        if group not in GROUPS:
            raise KeyError(group)
        return getattr(importlib.import_module(f"isobatch.{group}"), self._name)

    def __contains__(self, group: object) -> bool:
        return group in GROUPS

    def __iter__(self) -> Iterator[str]:
        return iter(GROUPS)

    def __len__(self) -> int:
        return len(GROUPS)


TABLES: Mapping[str, dict[str, Any]] = OfGroups("TABLE")
MARKS: Mapping[str, Marks] = OfGroups("MARKS")
