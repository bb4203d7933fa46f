"""Loops over the options of a config by what they say of themselves (marks.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from isobatch import marks
from isobatch.config.schema import Settings
from isobatch.config.tables import MARKS, TABLES
from isobatch.marks import Marks

# a top-level key that forgets to say anything is contract, which is refused rather than overlooked (a test asks for a mark)
TOP = Marks()


def top_level() -> dict[str, Marks]:
    """Key -> marks of the top-level keys that are no group."""
    return {field.name: marks.of(field, TOP) for field in dataclasses.fields(Settings)}


def group_options(group: str, name: Any) -> dict[str, Marks]:
    """Option -> marks of a choice of a group; of one that no table has, nothing."""
    cls = TABLES[group].get(name) if isinstance(name, str) else None
    return dict(marks.options(cls, MARKS[group])) if cls is not None else {}


def options(plain: Mapping[str, Any]) -> Iterator[tuple[str, Any, Marks]]:
    """(dotted key, value, marks) of every option of a resolved plain config."""
    for key, found in top_level().items():
        if key in plain:
            yield key, plain[key], found
    for group in TABLES:
        node = plain.get(group)
        if isinstance(node, Mapping):
            for option, found in group_options(group, node.get("name")).items():
                if option in node:
                    yield f"{group}.{option}", node[option], found


def paths() -> dict[str, str]:
    """Dotted key -> `file` or `maybe` of everything that any choice takes as a path."""
    found = {key: own.path for key, own in top_level().items() if isinstance(own.path, str)}
    found |= {f"{key}.{inner}": "file" for key, own in top_level().items() if isinstance(own.path, tuple) for inner in own.path}
    for group, table in TABLES.items():
        for cls in table.values():
            for option, own in marks.options(cls, MARKS[group]):
                found |= {f"{group}.{option}.{inner}": "file" for inner in own.path if isinstance(own.path, tuple)}
                if isinstance(own.path, str):
                    found.setdefault(f"{group}.{option}", own.path)
    return {key: kind for key, kind in found.items() if kind}  # type: ignore[misc]
