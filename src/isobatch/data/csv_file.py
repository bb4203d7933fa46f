"""`data=csv`: image files listed in csv files, one line per sample with a path and a label."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.data.base import Splits
from isobatch.data.files import ImageFileOptions
from isobatch.errors import ConfigError


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
        classes = sorted(set(train[1]), key=lambda label: (not label.isdigit(), int(label) if label.isdigit() else 0, label))
        unknown = sorted(set(evaluation[1]) - set(classes))
        if unknown:
            raise ConfigError("data.eval_csv", self.eval_csv,
                              f"has labels that {self.train_csv} lacks: {', '.join(unknown[:3])}",
                              f"add such samples to {self.train_csv}, or take them out")  # fmt: skip
        return train, evaluation, classes

    def _rows(self, root: Path, key: str) -> tuple[list[str], list[str]]:
        path = root / getattr(self, key)
        if not path.is_file():
            raise ConfigError(f"data.{key}", getattr(self, key), f"no such file below {root}", f"set data.{key}=<csv file>")
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames or []
            for column in ("path_column", "label_column"):
                if getattr(self, column) not in header:
                    raise ConfigError(f"data.{column}", getattr(self, column), f"{path} has the columns {', '.join(header)}",
                                      f"set data.{column} to one of them")  # fmt: skip
            rows = [(row[self.path_column], row[self.label_column]) for row in reader]
        if not rows:
            raise ConfigError(f"data.{key}", getattr(self, key), "lists no sample", "add lines below the header")
        if not (root / rows[0][0]).is_file():
            raise ConfigError("data.root", self.root, f"{path} lists {rows[0][0]}, which is not there",
                              "paths in the file are relative to data.root")  # fmt: skip
        names, labels = zip(*rows, strict=True)
        return list(names), list(labels)

    def load(self, augment: Any, seed: int) -> Splits:
        train, evaluation, classes = self._read()
        number = {name: i for i, name in enumerate(classes)}
        numbered = [(names, [number[label] for label in labels]) for names, labels in (train, evaluation)]
        return self.splits(numbered[0], numbered[1], classes, augment)
