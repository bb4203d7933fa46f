"""`task=evaluate`: an evaluation that also says what the model makes of every sample and of every class."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.tasks.base import Task, Work, needs_weights

if TYPE_CHECKING:
    from isobatch.config import Config
    from isobatch.evaluate import Confusion

log = logging.getLogger("isobatch")

MOST_ROWS = 1000  # classes of a table that a logger still shows


class Evaluate(Task):
    name = "evaluate"
    splits = ("eval", "test")

    def check(self, config: Config) -> None:
        needs_weights(self, config)

    def perform(self, work: Work) -> None:
        evaluate(work)


def evaluate(work: Work) -> None:
    """Evaluate; for data with classes write the files of isobatch.evaluate into the run folder too. A collective.

    The counts are integers and every sample has a place of its own, so the files are the same at any number of ranks.
    """
    from isobatch.evaluate import Answers, Confusion, write

    loop, info, run_dir = work.loop, work.info, work.run_dir
    evaluator, state = loop.evaluator, loop.state
    if info.num_classes and evaluator.one_label:
        evaluator.answers = Answers(len(evaluator.split), evaluator.device)
    loop.evaluate()
    if evaluator.answers is None:
        return
    answers = evaluator.answers.gather(loop.ranks)
    classes = Confusion(answers.counts(info.num_classes), info.class_names)
    loop.last_eval = {**loop.last_eval, **classes.means()}
    if not loop.ranks.is_main:
        return
    origin = getattr(work.config.model, "first_weights", None) if work.saved is None else work.saved.path
    about = {"checkpoint": str(origin), "step": state.step,
             "weights": "raw" if state.ema is None else "ema", "result": loop.last_eval}  # fmt: skip
    describe = getattr(evaluator.split.dataset, "describe", None)
    written = write(run_dir, answers, classes, describe, about)
    log_summary(classes, run_dir, written)
    rows = classes.rows()
    picture = run_dir / "confusion.png"
    images = {"confusion": picture} if picture in written else {}
    tables: dict[str, Any] = {}
    if len(rows) <= MOST_ROWS:
        tables["per_class"] = list(rows[0]), [list(row.values()) for row in rows]
    loop.logger.report({"samples": state.samples}, images, tables)


def log_summary(classes: Confusion, run_dir: Path, written: list[Path]) -> None:
    """Two lines for a person: where it is weakest, and where the rest is written."""
    there = [row for row in classes.rows() if row["samples"]]
    worst = min(there, key=lambda row: row["recall"])
    right = f"({worst['correct']} of {worst['samples']} right)"
    words = [f"weakest class {worst['name']} {right}" if worst["recall"] < 1 else "every sample of every class is right"]
    words += [f"most confused {m['label']} -> {m['prediction']} ({m['count']} times)" for m in classes.confused(1)]
    log.info("evaluation: %s", ", ".join(words))
    log.info("evaluation: %s in %s", ", ".join(path.name for path in written), run_dir)
