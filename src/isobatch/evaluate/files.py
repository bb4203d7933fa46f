"""predictions.csv, per_class.csv, confusion.csv, confusion.png and evaluation.json of a run folder."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from isobatch.evaluate.answers import Answers
from isobatch.evaluate.classes import Confusion
from isobatch.run_folder.files import write_json

MOST_CELLS = 1000  # classes of a confusion matrix that is still a table
NAMED, NUMBERED = 50, 20  # classes up to which the picture has their names, and the counts


def write(folder: Path, answers: Answers, classes: Confusion, describe: Callable[[int], str] | None,
          about: dict[str, Any]) -> list[Path]:  # fmt: skip
    """Write the files and return them.

    Args:
        describe: a sample's file by its index, where there are files.
        about: what evaluation.json begins with (which weights, their result).
    """
    rows = classes.rows()
    write_json(folder / "evaluation.json", {**about, "most_confused": classes.confused(), "classes": rows})
    columns = ["index", *(["file"] if describe else []), "label", "prediction", "probability", "correct"]
    _table(folder / "predictions.csv", columns, _predictions(answers, classes, describe))
    _table(folder / "per_class.csv", list(rows[0]), (["" if v is None else v for v in row.values()] for row in rows))
    written = [folder / name for name in ("evaluation.json", "predictions.csv", "per_class.csv")]
    if len(rows) <= MOST_CELLS:
        names = [row["name"] for row in rows]
        matrix = classes.counts.tolist()
        _table(folder / "confusion.csv", ["label", *names], ([name, *row] for name, row in zip(names, matrix, strict=True)))
        draw(folder / "confusion.png", names, matrix)
        written += [folder / "confusion.csv", folder / "confusion.png"]
    return written


def _predictions(answers: Answers, classes: Confusion, describe: Callable[[int], str] | None) -> Iterable[list[Any]]:
    said = zip(answers.labels.tolist(), answers.predictions.tolist(), answers.probabilities.tolist(), strict=True)
    for index, (label, prediction, probability) in enumerate(said):
        file = [describe(index)] if describe else []
        yield [index, *file, classes.name(label), classes.name(prediction), f"{probability:.6f}", int(label == prediction)]


def _table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:  # a file name may be any bytes
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def draw(path: Path, names: Sequence[str], matrix: Sequence[Sequence[int]]) -> None:
    """The matrix as a picture: a cell's colour is its share of the row, so that rare classes are seen too."""
    # Agg by name and no pyplot: no display is needed and no global figure is left behind
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    n = len(names)
    shares = [[cell / (sum(row) or 1) for cell in row] for row in matrix]
    side = min(12.0, 3.6 + 0.32 * n)
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of the label's samples")
    axes.set_xlabel("prediction")
    axes.set_ylabel("label")
    if n <= NAMED:
        short = [name if len(name) <= 18 else name[:17] + "…" for name in names]
        size = 9 if n <= NUMBERED else 6
        axes.set_xticks(range(n), short, rotation=90, fontsize=size, parse_math=False)
        axes.set_yticks(range(n), short, fontsize=size, parse_math=False)
    if n <= NUMBERED:
        for i, row in enumerate(matrix):
            for j, cell in enumerate(row):
                if cell:
                    axes.text(j, i, str(cell), ha="center", va="center", fontsize=8,
                              color="white" if shares[i][j] > 0.5 else "black")  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class name in a script that the font lacks
        figure.savefig(path, dpi=110)
