"""Which class a folder or label is of, and the order of the classes: sorted, or as a file says."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.errors import ConfigError

KEY = "data.class_map"
LEFT_OUT = -1  # the class number of a sample that is not part of the data


@dataclass(frozen=True)
class ClassMap:
    """
    Args:
        number: folder or label -> class number.
        names: of the classes.
        path: the file that says so.
    """

    number: dict[str, int]
    names: list[str]
    path: str | None = None

    @classmethod
    def of(cls, names: Sequence[str]) -> ClassMap:
        """Every name a class of its own, in this order."""
        return cls({name: i for i, name in enumerate(names)}, list(names))

    def of_labels(self, labels: Iterable[Any], where: str) -> Any:
        """Class numbers (N,) int64 of the labels in `where` as they are written; `LEFT_OUT` of those that it does not name.

        Raises:
            ConfigError: it names none of them.
        """
        import numpy

        numbers = numpy.array([self.number.get(str(label), LEFT_OUT) for label in labels], dtype=numpy.int64)
        if not (numbers >= 0).any():
            raise ConfigError(KEY, self.path, f"names no label of {where}", "list labels as they are written there")
        return numbers

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
        return cls(number, list(names), path)


def numbered(train: Any, evaluation: Any, keys: tuple[str, str], names: tuple[str, str],
             count: int = 0) -> tuple[list[str], Any, Any]:  # fmt: skip
    """Class names, and the class numbers (N,) of both splits.

    Args:
        train, evaluation: labels as they were read, integers or text. Integers, and text that is nothing but integers in
            all of `train`, are class numbers as they stand; other text is numbered in sorted order.
        keys, names: the setting of each split and its value, to name in a refusal.
        count: of classes, where more are known than `train` has samples of.
    Raises:
        ConfigError: a negative number (the hub's mark for "no label"), or a label that `train` does not have.
    """
    import numpy

    if not isinstance(train, numpy.ndarray) and all(re.fullmatch(r"-?\d+", str(label)) for label in train):
        train = numpy.array([int(label) for label in train], dtype=numpy.int64)
    if isinstance(train, numpy.ndarray):
        try:
            evaluation = numpy.asarray([int(label) for label in evaluation], dtype=numpy.int64)
        except ValueError:
            raise ConfigError(keys[1], names[1], f"has labels in words, {names[0]} has numbers", "label both alike") from None
        for labels, key, name in ((train, keys[0], names[0]), (evaluation, keys[1], names[1])):
            if (labels < 0).any():
                raise ConfigError(key, name, f"has {int((labels < 0).sum())} samples without a label (a negative number)",
                                  f"set {key} to samples that are labelled")  # fmt: skip
        number: dict[Any, int] = {i: i for i in range(max(count, int(train.max()) + 1))}
        used = numpy.unique(evaluation).tolist()
    else:
        number = {label: i for i, label in enumerate(sorted(set(train)))}
        used = sorted({str(label) for label in evaluation})
    unknown = [str(label) for label in used if label not in number]
    if unknown:
        raise ConfigError(keys[1], names[1], f"has labels that {names[0]} lacks: {', '.join(unknown[:3])}",
                          "give both the same classes")  # fmt: skip
    if not isinstance(train, numpy.ndarray):
        train, evaluation = ([number[str(label)] for label in labels] for labels in (train, evaluation))
    return [str(label) for label in number], train, evaluation
