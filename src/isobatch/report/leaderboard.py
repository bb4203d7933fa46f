"""The leaderboard as an HTML table: every column, each cell with its exact value for sorting."""

from __future__ import annotations

import itertools
import math
from html import escape

from isobatch.report.cells import show
from isobatch.report.config_columns import Cell
from isobatch.report.curves import colour
from isobatch.report.scan import number
from isobatch.report.table import JOB, SAME, Column, Leaderboard
from isobatch.run_folder.layout import DONE

_BARS = {"samples/s", "peak MB"}  # columns whose cells carry a bar as wide as the value


def badge(state: str) -> str:
    """A job's state as a coloured label."""
    kind = {**dict.fromkeys(DONE, "good"), "failed": "bad", "died": "bad", "refused": "bad"}.get(state, "warn")
    return f'<span class="badge {kind}">{escape(state)}</span>'


def leaderboard(comparison: Leaderboard) -> str:
    """The table. Column groups are headed; the column that the rows are ordered by says so to screen readers."""
    rows = comparison.rows
    folded = constant(comparison)
    columns = [column for column in comparison.columns if column not in folded]
    spans = [(name, len(list(members))) for name, members in itertools.groupby(columns, key=lambda c: c.group)]
    edges = set(itertools.accumulate(span for _, span in spans))  # the columns that begin a group
    top = "".join(f'<th colspan="{span}" class="edge">{name}</th>' for name, span in spans)
    heads = []
    for at, column in enumerate(columns):
        order = f' aria-sort="{"descending" if column.better > 0 else "ascending"}"'
        heads.append(
            f'<th scope="col" class="h{" edge" * (at in edges)}"{order * (column.key == comparison.primary)}>'
            f"<button>{_breakable(column.title)}</button></th>"
        )
    leading = {c.key: set(comparison.leading(c.key)) for c in columns}
    widest = {key: max([number(row.get(key)) for row in rows if number(row.get(key)) > 0] or [1]) for key in _BARS}
    lines = []
    for index, row in enumerate(rows):
        cells = [
            _cell(row[c.key], c, index in leading[c.key], widest.get(c.key), "edge" if at in edges else "")
            for at, c in enumerate(columns)
            if c.key != JOB
        ]
        dot = f'<i class="dot" style="background:{colour(index, len(rows))}"></i>'
        job, name = escape(str(row[JOB])), escape(comparison.names[index], quote=True)
        lines.append(f'<tr data-j="{index}" data-n="{name}"><th scope="row" data-v="{job}" title="{name}">{dot}{job}</th>'
                     f'{"".join(cells)}</tr>')  # fmt: skip
    head = f'<thead><tr class="groups">{top}</tr><tr>{"".join(heads)}</tr></thead>'
    shared = {c.title: next(row[c.key] for row in rows if row[c.key] is not None) for c in folded}
    same = "".join(f"<span class='value'>{escape(key)} <b>{escape(show(value))}</b></span>" for key, value in shared.items())
    fold = f'<details class="folded"><summary>{len(folded)} columns that are the same for all</summary>{same}</details>'
    return (f'<div class="scroll" tabindex="0"><table id="jobs">{head}<tbody>{"".join(lines)}</tbody></table></div>'
            f'{fold if folded else ""}')  # fmt: skip


def constant(comparison: Leaderboard) -> list[Column]:
    """Columns that show the same in every row of several: they are told once, below the table."""
    if len(comparison.rows) < 2:
        return []
    keep = {JOB, "state", comparison.primary, *comparison.swept}
    return [c for c in comparison.columns if c.key not in keep and c.group != SAME
            and len({show(row[c.key]) for row in comparison.rows if row[c.key] is not None}) == 1]  # fmt: skip


def _breakable(title: str) -> str:
    """A long heading may wrap after its dots and slashes."""
    text = escape(title)
    return text.replace(".", ".<wbr>").replace("/", "/<wbr>") if len(title) > 10 else text


def _cell(value: Cell, column: Column, best: bool, widest: float | None, edge: str) -> str:
    if column.key == "state":
        return f'<td class="{edge}" data-v="{escape(str(value))}">{badge(str(value))}</td>'
    names, style = [edge] if edge else [], ""
    if value is None:
        return f'<td class="{" ".join([*names, "none"])}">–</td>'
    if isinstance(value, int | float) and not isinstance(value, bool):
        names.append("n")
        if best:
            names.append("best")
        if not math.isfinite(value):
            names.append("odd")
        elif widest and value > 0:
            names.append("bar")
            style = f' style="--p:{100 * value / widest:.0f}%"'
    elif column.key == "error":
        names.append("error")
    elif column.key == "losses part at" and str(value).startswith("identical"):
        names.append("same")
    shown, raw = escape(show(value)), escape(str(value))
    title = f' title="{raw}"' if shown != raw else ""
    return f'<td class="{" ".join(names)}" data-v="{raw}"{title}{style}>{shown}</td>'
