"""Which class a folder or label is of, and the order of the classes: sorted, or as a file says."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isobatch.errors import ConfigError

KEY = "data.class_map"


@dataclass(frozen=True)
class ClassMap:
    """
    Args:
        number: folder or label -> class number.
        names: of the classes.
    """

    number: dict[str, int]
    names: list[str]

    @classmethod
    def of(cls, names: Sequence[str]) -> ClassMap:
        """Every name a class of its own, in this order."""
        return cls({name: i for i, name in enumerate(names)}, list(names))

    @classmethod
    def read(cls, path: str) -> ClassMap:
        """A text file: `name` or `name,class` a line; classes are numbered as they first come.

        Raises:
            ConfigError: it cannot be read, says nothing, or gives a name two classes.
        """
        way_out = "write a folder or label a line, as `name` or `name,class`"
        try:
            with Path(path).open(newline="", encoding="utf-8-sig") as file:
                lines = [[cell.strip() for cell in row] for row in csv.reader(file, strict=True)]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(KEY, path, f"cannot be read ({error})", f"{way_out}, as UTF-8") from None
        number: dict[str, int] = {}
        names: dict[str, int] = {}
        for row in filter(any, lines):
            if len(row) > 2 or not all(row):
                raise ConfigError(KEY, path, f"has the line {','.join(row)[:100]!r}", way_out)
            if row[0] in number:
                raise ConfigError(KEY, path, f"names {row[0]} twice", way_out)
            number[row[0]] = names.setdefault(row[-1], len(names))
        if len(names) < 2:
            raise ConfigError(KEY, path, f"makes {len(names)} class(es), and nothing can be told apart", way_out)
        return cls(number, list(names))
