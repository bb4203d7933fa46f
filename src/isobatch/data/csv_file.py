"""`data=csv`: image files listed in csv files, one line per sample with a path and a label, several labels, or numbers."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobatch.data.base import Splits
from isobatch.data.class_map import ClassMap
from isobatch.data.files import ImageFileOptions
from isobatch.errors import ConfigError
from isobatch.marks import option


def class_order(label: str) -> tuple[bool, int, str]:
    """Numbers first, by size; then text. What is longer than any number of a class is text."""
    number = label.isdecimal() and len(label) < 20  # isdigit() would take characters that int() does not
    return not number, int(label) if number else 0, label


def is_file(path: Path) -> bool:
    """False also for a name that no file system takes (too long; pathlib raises OSError for it)."""
    try:
        return path.is_file()
    except OSError:
        return False


@dataclass(frozen=True, kw_only=True)
class CsvFile(ImageFileOptions):
    """Two csv files with a header line; paths in them and their own are relative to `root`.

    Labels are any text; the classes are those of the training file, sorted (as numbers where all are numbers).

    Args:
        train_csv, eval_csv, test_csv: the files; eval_csv is not read where samples are held out, test_csv may be null.
        class_map: see ImageFolder; labels take the place of folders.
        path_column, label_column: names in the header.
        label_columns: in the place of label_column, a column for each class, 1 where a sample has it and 0 where it has not.
        target_columns: in its place, columns of numbers.
    """

    name: str = "csv"
    train_csv: str = "train.csv"
    eval_csv: str = "val.csv"
    path_column: str = "path"
    label_column: str = "label"
    label_columns: list[str] = field(default_factory=list)
    target_columns: list[str] = field(default_factory=list)
    test_csv: str | None = option(None, resume="free")
    class_map: str | None = option(None, resume="free", path="file")  # the class names are compared

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_columns and self.target_columns:
            raise ConfigError("data.target_columns", self.target_columns, "are given beside data.label_columns",
                              "set one of the two")  # fmt: skip
        if self.class_map and self.rows_of_numbers:
            raise ConfigError("data.class_map", self.class_map, f"is about one label of a sample, and {self.columns} are read",
                              "set data.class_map=null")  # fmt: skip

    @property
    def rows_of_numbers(self) -> bool:
        return bool(self.label_columns or self.target_columns)

    @property
    def columns(self) -> list[str]:
        """What is read of a line beside its path."""
        return self.label_columns or self.target_columns or [self.label_column]

    def check(self) -> None:
        """Raise ConfigError when a file, a column, or the first listed image is missing, or classes do not match."""
        self._read()

    def _read(self) -> tuple[list[tuple[list[str], Any] | None], ClassMap]:
        """(path, label) lists of training, evaluation and test (None: not read), and the classes."""
        root = self.checked_root()
        keys = ("train_csv", "eval_csv", "test_csv")
        read = [None if (key == "eval_csv" and self.holds_out) or getattr(self, key) is None else self._rows(root, key)
                for key in keys]  # fmt: skip
        assert read[0] is not None
        if self.rows_of_numbers:
            return read, ClassMap.of(self.label_columns)
        labels = sorted(set(read[0][1]), key=class_order)
        classes = ClassMap.read(self.class_map) if self.class_map else ClassMap.of(labels)
        if self.class_map:
            read = [None if rows is None else kept(rows, classes) for rows in read]
            if not read[0][0]:  # type: ignore[index]
                raise ConfigError("data.class_map", self.class_map, f"names no label of {self.train_csv}",
                                  "list labels as they are written there")  # fmt: skip
        for key, rows in zip(keys, read, strict=True):
            unknown = [] if rows is None else sorted(set(rows[1]) - classes.number.keys())
            if unknown:
                raise ConfigError(f"data.{key}", getattr(self, key),
                                  f"has labels that {self.train_csv} lacks: {', '.join(unknown[:3])}",
                                  f"add such samples to {self.train_csv}, or take them out")  # fmt: skip
        return read, classes

    def _rows(self, root: Path, key: str) -> tuple[list[str], Any]:
        """Names, and labels: texts, or an array (N, columns) of float32."""
        path = root / getattr(self, key)
        if not is_file(path):
            raise ConfigError(f"data.{key}", getattr(self, key), f"no such file below {root}", f"set data.{key}=<csv file>")
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                rows = self._cells(csv.DictReader(file, strict=True), path, key)
        except (UnicodeDecodeError, csv.Error, OSError) as error:
            raise ConfigError(f"data.{key}", getattr(self, key), f"cannot be read as text with commas ({error})",
                              "write it as UTF-8, a path and a label per line") from None  # fmt: skip
        if not rows:
            raise ConfigError(f"data.{key}", getattr(self, key), "lists no sample", "add lines below the header")
        if not is_file(root / rows[0][0]):
            raise ConfigError("data.root", self.root, f"{path} lists {rows[0][0][:200]}, which is not there",
                              "paths in the file are relative to data.root")  # fmt: skip
        names, labels = zip(*rows, strict=True)
        if not self.rows_of_numbers:
            return list(names), [label for (label,) in labels]
        import numpy

        return list(names), numpy.array(labels, dtype=numpy.float32)

    def _cells(self, reader: csv.DictReader[str], path: Path, key: str) -> list[tuple[str, tuple[Any, ...]]]:
        """(path, labels) of every line; refuses columns that are missing or there twice, and cells that are missing."""
        header = reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
        column = "label_columns" if self.label_columns else "target_columns" if self.target_columns else "label_column"
        for column, name in (("path_column", self.path_column), *((column, name) for name in self.columns)):
            if header.count(name) != 1:
                problem = f"has the columns {', '.join(header)}" if header else "is empty"
                raise ConfigError(f"data.{column}", name, f"{path} {problem}",
                                  f"set data.{column} to one that is there once")  # fmt: skip
        rows = []
        for row in reader:
            # blanks around a cell are nobody's file name or class; without this "cat" and " cat" are two
            for column in (self.path_column, *self.columns):
                row[column] = (row[column] or "").strip()
            if not all(row[column] for column in (self.path_column, *self.columns)):
                raise ConfigError(f"data.{key}", getattr(self, key), f"line {reader.line_num} has no path or no label",
                                  "write both on every line, or take it out")  # fmt: skip
            rows.append((row[self.path_column], tuple(self._value(row[name], key, reader.line_num) for name in self.columns)))
        return rows

    def _value(self, cell: str, key: str, line: int) -> Any:
        """A cell as text, or as the number that it has to be."""
        if not self.rows_of_numbers:
            return cell
        try:
            number = float(cell)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or (self.label_columns and number not in (0, 1)):
            raise ConfigError(
                f"data.{key}",
                getattr(self, key),
                f"line {line} has {cell[:40]} where {'0 or 1' if self.label_columns else 'a number'} has to be",
                "repair it, or take it out",
            )
        return number

    def load(self, augment: Any, seed: int) -> Splits:
        read, classes = self._read()
        if self.rows_of_numbers:
            known: dict[str, Any] = {"labels": "several"} if self.label_columns else {"outputs": len(self.target_columns)}
            assert read[0] is not None
            return self.splits(read[0], read[1], read[2], classes.names if self.label_columns else (), augment, **known)
        train, evaluation, test = (
            None if rows is None else (rows[0], [classes.number[label] for label in rows[1]]) for rows in read
        )
        assert train is not None
        return self.splits(train, evaluation, test, classes.names, augment)


def kept(rows: tuple[list[str], Any], classes: ClassMap) -> tuple[list[str], list[str]]:
    """The lines whose label is in the map."""
    chosen = [(name, label) for name, label in zip(*rows, strict=True) if label in classes.number]
    return [name for name, _ in chosen], [label for _, label in chosen]
