"""Group `writer`: what `task=predict` makes of the model's answers. Rows come in the order of the samples, on the main rank."""

from __future__ import annotations

import csv
import importlib.util
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from isobatch.errors import ConfigError
from isobatch.marks import Marks

if TYPE_CHECKING:
    from torch import Tensor

FILE = "predictions"
MASKS = "masks"  # the folder of pictures that hold the class of every pixel
MOST_NUMBERS = 4096  # of a sample without classes that are still a table's columns


@dataclass(frozen=True)
class About:
    """What is known before the first row.

    Args:
        class_names: one per output; () = the outputs are numbers.
        top: answers per sample that a table names. samples: how many there will be.
        classes: how many there are, named or not.
    """

    class_names: tuple[str, ...]
    top: int
    samples: int
    classes: int = 0


@dataclass(frozen=True)
class Answered:
    """The answers to some samples in their order.

    Args:
        start: number of the first one. names: of all of them (a file, or what the data set says).
        outputs: as the model gave them: any tree of tensors (n, ...), float32, on the CPU. None where `classes` are all that
            the choice asks for.
        probabilities: (n, classes); None = there are no classes, or one of each element.
        classes: of every element (pixel, letter) of a sample the class that is most probable: (n, ...) integers; None = a
            sample has no such elements.
    """

    start: int
    names: Sequence[str]
    outputs: Any
    probabilities: Tensor | None
    classes: Tensor | None = None


class Writer(Protocol):
    """What a choice builds, on the main rank."""

    def write(self, answered: Answered) -> None: ...

    def close(self) -> None:
        """After the last row; an interrupted prediction does not come here."""


class Columns:
    """A table's columns and rows: index, name, and per sample the `top` classes with probabilities, or its numbers; of a class
    for each pixel a picture's name, of one for each letter the numbers of the classes."""

    def __init__(self, about: About, choice: str, folder: Path):
        self.about, self.choice = about, choice
        self.masks = PartFile(folder, MASKS)

    def names(self, first: Answered) -> list[str]:
        """Raises ConfigError for answers that are no row."""
        if first.classes is not None and first.classes.ndim in (2, 3):
            return ["index", "name", "classes" if first.classes.ndim == 2 else "mask"]
        if first.probabilities is not None:
            top = range(min(self.about.top, first.probabilities.shape[1]))
            ends = ["" if k == 0 else f"_{k + 1}" for k in top]
            return ["index", "name", *(f"{word}{end}" for end in ends for word in ("prediction", "probability"))]
        outputs = first.outputs if first.classes is None else first.classes
        shape = getattr(outputs, "shape", None)
        width = 0 if shape is None or first.classes is not None else outputs.reshape(len(first.names), -1).shape[1]
        if shape is None or not 0 < width <= MOST_NUMBERS:
            raise ConfigError("writer.name", self.choice, f"the model's answer ({_form(outputs)}) is no row of a table",
                              "register a writer of your own for it (docs/evaluation-and-export.md)")  # fmt: skip
        return ["index", "name", *(["output"] if width == 1 else [f"output_{k}" for k in range(width)])]

    def rows(self, answered: Answered) -> Iterator[list[Any]]:
        if answered.classes is not None:
            for k, classes in enumerate(answered.classes):
                yield [answered.start + k, answered.names[k], self.text_of(answered.start + k, classes)]
            return
        if answered.probabilities is None:
            for k, values in enumerate(answered.outputs.reshape(len(answered.names), -1).tolist()):
                yield [answered.start + k, answered.names[k], *values]
            return
        values, numbers = answered.probabilities.topk(min(self.about.top, answered.probabilities.shape[1]), dim=1)
        names = self.about.class_names
        for k, (some, which) in enumerate(zip(values.tolist(), numbers.tolist(), strict=True)):
            said = [cell for p, i in zip(some, which, strict=True) for cell in (names[i] if i < len(names) else str(i), p)]
            yield [answered.start + k, answered.names[k], *said]

    def text_of(self, index: int, classes: Tensor) -> str:
        """The cell for the classes of one sample's elements; those of pixels become a picture, a grey level per class."""
        if classes.ndim == 1:
            return " ".join(map(str, classes.tolist()))
        import numpy
        from PIL import Image

        digits = len(str(max(self.about.samples - 1, 0)))
        name = f"{index:0{digits}d}.png"
        self.masks.part.mkdir(exist_ok=True)
        kind = numpy.uint8 if max(self.about.classes, len(self.about.class_names)) <= 256 else numpy.uint16
        Image.fromarray(classes.numpy().astype(kind)).save(self.masks.part / name)
        return f"{MASKS}/{name}"

    def done(self) -> None:
        """After the last row: the pictures are complete."""
        if self.masks.part.is_dir():
            shutil.rmtree(self.masks.path, ignore_errors=True)  # of an earlier start in this folder
            self.masks.done()


class PartFile:
    """A file that has its name when it is complete, and not before."""

    def __init__(self, folder: Path, name: str):
        self.path, self.part = folder / name, folder / f"{name}.part"

    def done(self) -> None:
        os.replace(self.part, self.path)


class CsvWriter:
    def __init__(self, folder: Path, about: About):
        self.columns, self.place = Columns(about, "csv", folder), PartFile(folder, f"{FILE}.csv")
        self.file = self.place.part.open("w", encoding="utf-8", errors="surrogateescape", newline="")  # names may be any bytes
        self.table = csv.writer(self.file, lineterminator="\n")
        self.begun = False

    def write(self, answered: Answered) -> None:
        if not self.begun:
            self.table.writerow(self.columns.names(answered))
            self.begun = True
        for row in self.columns.rows(answered):
            self.table.writerow([f"{cell:.6f}" if isinstance(cell, float) else cell for cell in row])

    def close(self) -> None:
        self.file.close()
        self.columns.done()
        self.place.done()


class ParquetWriter:
    def __init__(self, folder: Path, about: About):
        self.columns, self.place = Columns(about, "parquet", folder), PartFile(folder, f"{FILE}.parquet")
        self.schema: Any = None
        self.table: Any = None

    def write(self, answered: Answered) -> None:
        import pyarrow
        import pyarrow.parquet

        if self.table is None:
            kinds = {"index": pyarrow.int64(), **dict.fromkeys(("name", "mask", "classes"), pyarrow.string())}
            fields = [(name, kinds.get(name, pyarrow.string() if name.startswith("prediction") else pyarrow.float32()))
                      for name in self.columns.names(answered)]  # fmt: skip
            self.schema = pyarrow.schema(fields)
            self.table = pyarrow.parquet.ParquetWriter(str(self.place.part), self.schema)
        columns = list(zip(*self.columns.rows(answered), strict=True))
        columns[1] = tuple(name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in columns[1])
        arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, self.schema, strict=True)]
        self.table.write_table(pyarrow.Table.from_arrays(arrays, schema=self.schema))

    def close(self) -> None:
        self.table.close()
        self.columns.done()
        self.place.done()


class WriterOptions(Protocol):
    """The options of group `writer`. `whole`: it wants the scores of every class of every pixel too, not the classes alone."""

    whole: ClassVar[bool]

    @property
    def name(self) -> str: ...

    def check(self) -> None:
        """Refuse what this machine cannot do. Cheap: imports nothing."""

    def build(self, folder: Path, about: About) -> Writer: ...


@dataclass(frozen=True)
class Csv:
    """predictions.csv, as UTF-8 with a header line."""

    name: str = "csv"
    whole: ClassVar[bool] = False

    def check(self) -> None:
        """Refuse what this machine cannot do. Cheap: imports nothing."""

    def build(self, folder: Path, about: About) -> Writer:
        return CsvWriter(folder, about)


@dataclass(frozen=True)
class Parquet:
    """predictions.parquet."""

    name: str = "parquet"
    whole: ClassVar[bool] = False

    def check(self) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            raise ConfigError("writer", "parquet", "the package pyarrow is not installed",
                              "pip install 'isobatch[parquet]', or set writer=csv")  # fmt: skip

    def build(self, folder: Path, about: About) -> Writer:
        return ParquetWriter(folder, about)


def _form(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"a tensor {list(shape)}"


TABLE: dict[str, Any] = {"csv": Csv, "parquet": Parquet}
MARKS = Marks(resume="free")
