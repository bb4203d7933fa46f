"""Whether the jobs of a sweep trained the same model: the verdict of `experiment=equivalence`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from isobatch.report.first_difference import first_difference
from isobatch.report.read import RunRecord
from isobatch.report.text import show

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Verdict:
    """Whether one job trained the same model as the first, within a tolerance."""

    job: str
    loss_difference: float | None
    weight_distance: float | None
    parted: int | None
    bitwise: bool
    passed: bool
    reason: str

    @property
    def word(self) -> str:
        return "PASS" if self.passed else "FAIL"


def compare(runs: Sequence[RunRecord], tolerance: float) -> list[Verdict]:
    """The equivalence verdict of every run against the first one, as `read_runs` compared them.

    tolerance: largest absolute difference allowed in any train/loss and in any weight; 0 asks for every bit. What
    cannot be compared fails: a run that did not complete, other steps, no weights, losses that end in NaN.
    """
    folders = {run.job: run.folder for run in runs}
    verdicts = []
    for run in runs:
        verdict = _verdict(run, tolerance)
        if not verdict.passed and run.completed and run.difference.reference in folders:
            hint = first_difference(folders[run.difference.reference], run.folder)
            verdict = replace(verdict, reason="; ".join(filter(None, (verdict.reason, hint))))
        verdicts.append(verdict)
    return verdicts


def _verdict(run: RunRecord, tolerance: float) -> Verdict:
    d = run.difference
    whole = d.common_steps > 0 and d.only_here == 0 and d.only_there == 0
    last = run.metrics.last_train.get("train/loss")
    if not run.completed:
        reason = run.ending
    elif not whole:
        reason = f"only {d.common_steps} of {d.common_steps + d.only_here + d.only_there} logged steps are common"
    elif not isinstance(last, int | float) or not math.isfinite(last):
        reason = "the losses end in a value that is not finite"
    elif d.loss is None or not d.loss <= tolerance:
        reason = f"losses differ by {show(d.loss)}, more than {tolerance:g}"
    elif d.weights is None:
        reason = "no saved weights to compare"
    elif not d.weights <= tolerance or (tolerance == 0 and d.same_weights is False):
        reason = f"weights differ by {show(d.weights)}, more than {tolerance:g}"
    else:
        reason = ""
    return Verdict(
        job=run.job,
        loss_difference=d.loss,
        weight_distance=d.weights,
        parted=d.parted,
        bitwise=whole and d.identical and d.weights == 0 and d.same_weights is not False,
        passed=not reason,
        reason=reason,
    )


def print_verdicts(verdicts: Sequence[Verdict], tolerance: float, console: Console | None = None) -> None:
    """The verdicts as a table in the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    title = f"Same training within {tolerance:g}?" if tolerance else "Same training, to the bit?"
    table = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("job", "loss difference", "weight distance", "losses part at", "to the bit", "verdict"):
        table.add_column(heading)
    for v in verdicts:
        parted = "identical" if v.parted is None and v.loss_difference == 0 else show(v.parted)
        cells = [v.job, show(v.loss_difference), show(v.weight_distance), parted, "yes" if v.bitwise else "no"]
        table.add_row(*map(Text, cells), Text(v.word, style="bold green" if v.passed else "bold red"))
    console = console or Console()
    console.print(table)
    for v in verdicts:  # below, where a reason has the whole width
        if v.reason:
            console.print(Text(f"job {v.job}: {v.reason}"))
