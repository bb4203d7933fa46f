"""`data=csv`: image files listed in csv files, one line per sample with a path and a label."""

from __future__ import annotations

import csv
from dataclasses import dataclass
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
    """

    name: str = "csv"
    train_csv: str = "train.csv"
    eval_csv: str = "val.csv"
    path_column: str = "path"
    label_column: str = "label"
    test_csv: str | None = option(None, resume="free")
    class_map: str | None = option(None, resume="free", path="file")  # the class names are compared

    def check(self) -> None:
        """Raise ConfigError when a file, a column, or the first listed image is missing, or classes do not match."""
        self._read()

    def _read(self) -> tuple[list[tuple[list[str], list[str]] | None], ClassMap]:
        """(path, label) lists of training, evaluation and test (None: not read), and the classes."""
        root = self.checked_root()
        keys = ("train_csv", "eval_csv", "test_csv")
        read = [None if (key == "eval_csv" and self.holds_out) or getattr(self, key) is None else self._rows(root, key)
                for key in keys]  # fmt: skip
        assert read[0] is not None
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

    def _rows(self, root: Path, key: str) -> tuple[list[str], list[str]]:
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
        return list(names), list(labels)

    def _cells(self, reader: csv.DictReader[str], path: Path, key: str) -> list[tuple[str, str]]:
        """(path, label) of every line; refuses columns that are missing or there twice, and cells that are missing or empty."""
        header = reader.fieldnames = [name.strip() for name in reader.fieldnames or []]
        for column in ("path_column", "label_column"):
            name = getattr(self, column)
            if header.count(name) != 1:
                problem = f"has the columns {', '.join(header)}" if header else "is empty"
                raise ConfigError(f"data.{column}", name, f"{path} {problem}",
                                  f"set data.{column} to one that is there once")  # fmt: skip
        rows = []
        for row in reader:
            # blanks around a cell are nobody's file name or class; without this "cat" and " cat" are two
            for column in (self.path_column, self.label_column):
                row[column] = (row[column] or "").strip()
            if not row[self.path_column] or not row[self.label_column]:
                raise ConfigError(f"data.{key}", getattr(self, key), f"line {reader.line_num} has no path or no label",
                                  "write both on every line, or take it out")  # fmt: skip
            rows.append((row[self.path_column], row[self.label_column]))
        return rows

    def load(self, augment: Any, seed: int) -> Splits:
        read, classes = self._read()
        train, evaluation, test = (
            None if rows is None else (rows[0], [classes.number[label] for label in rows[1]]) for rows in read
        )
        assert train is not None
        return self.splits(train, evaluation, test, classes.names, augment)


def kept(rows: tuple[list[str], list[str]], classes: ClassMap) -> tuple[list[str], list[str]]:
    """The lines whose label is in the map."""
    chosen = [(name, label) for name, label in zip(*rows, strict=True) if label in classes.number]
    return [name for name, _ in chosen], [label for _, label in chosen]
