"""`data=csv`: image files listed in csv files, one line per sample with a path and a label."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.data.base import Splits
from isobatch.data.files import ImageFileOptions
from isobatch.errors import ConfigError


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
        train_csv, eval_csv: the files.
        path_column, label_column: names in the header.
    """

    name: str = "csv"
    train_csv: str = "train.csv"
    eval_csv: str = "val.csv"
    path_column: str = "path"
    label_column: str = "label"

    def check(self) -> None:
        """Raise ConfigError when a file, a column, or the first listed image is missing, or classes do not match."""
        self._read()

    def _read(self) -> tuple[tuple[list[str], list[str]], tuple[list[str], list[str]], list[str]]:
        root = self.checked_root()
        train = self._rows(root, "train_csv")
        evaluation = self._rows(root, "eval_csv")
        classes = sorted(set(train[1]), key=class_order)
        unknown = sorted(set(evaluation[1]) - set(classes))
        if unknown:
            raise ConfigError("data.eval_csv", self.eval_csv,
                              f"has labels that {self.train_csv} lacks: {', '.join(unknown[:3])}",
                              f"add such samples to {self.train_csv}, or take them out")  # fmt: skip
        return train, evaluation, classes

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
        train, evaluation, classes = self._read()
        number = {name: i for i, name in enumerate(classes)}
        numbered = [(names, [number[label] for label in labels]) for names, labels in (train, evaluation)]
        return self.splits(numbered[0], numbered[1], classes, augment)
