"""report.html: one file with everything in it, that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path

from isobatch.report.cells import show
from isobatch.report.curves import AXES, METRICS, collect, colour, svg
from isobatch.report.leaderboard import badge, leaderboard
from isobatch.report.read import RunRecord, one_line
from isobatch.report.table import Leaderboard

_FIND = '<input id="find" type="search" placeholder="Filter jobs" aria-label="Filter jobs">'
_JOBS_IN_LEGEND, _JOBS_WITH_BARS, _VALUES_PER_KEY, _REASONS = 40, 40, 12, 8


def render(comparison: Leaderboard, folders: Sequence[Path]) -> str:
    """The page. Whatever comes from a run is escaped, and a policy in the page lets no script run but ours."""
    css, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    count = len(comparison.runs)
    title = f"{count} job{'s' * (count != 1)} compared"
    where = ", ".join(escape(one_line(folder)) for folder in folders)
    body = "".join(
        [
            f'<header><p class="mark">isobatch</p><h1>{title}</h1><p class="where">{where}',
            f" <span>{datetime.now():%Y-%m-%d %H:%M}</span></p></header><main>",
            _cards(comparison),
            _problems(comparison),
            _section("Leaderboard", leaderboard(comparison), _FIND),
            _curves(comparison),
            _memory(comparison),
            _config(comparison),
            "</main>",
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><title>{title}</title><style>{css}</style></head><body>{body}'
        f"<script>{script}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return files("isobatch.report").joinpath(name).read_text(encoding="utf-8")


def _section(name: str, content: str, aside: str = "") -> str:
    anchor = name.lower().replace(" ", "-")
    return f'<section id="{anchor}"><div class="head"><h2>{name}</h2>{aside}</div>{content}</section>'


def _cards(comparison: Leaderboard) -> str:
    total, done = len(comparison.runs), len(comparison.runs) - comparison.failed
    failed = f"{comparison.failed} did not complete" if comparison.failed else "all of them"
    failed += f", {comparison.pruned} pruned" if comparison.pruned else ""
    cards = [("completed", f"{done}<small> of {total}</small>", failed)]
    for key, unit in ((comparison.primary, ""), ("samples/s", " samples/s"), ("peak MB", " MB")):
        best = comparison.best(key) if key else None
        if key and best is not None:
            winners = comparison.winners(key)
            alike = len(winners) > 1 and not comparison.leading(key)
            who = "the same for all" if alike else _who([comparison.names[at] for at in winners])
            label = {"samples/s": "fastest", "peak MB": "least peak memory"}.get(key, key)
            cards.append((label, f"{show(best)}<small>{unit}</small>", who))
    if spread := comparison.spread():
        what, _, found = spread.partition(": mean ")
        cards.append((f"mean {what}", show(float(found.partition(",")[0])), found.partition(", ")[2]))
    known = [run for run in comparison.runs if run.difference.common_steps and run.job != run.difference.reference]
    if known and comparison.one_training:
        same = sum(run.difference.identical for run in known)
        cards.append(
            (
                "same losses, to the bit",
                f"{same}<small> of {len(known)}</small>",
                f"as job {known[0].difference.reference}",
            )
        )
    items = "".join(
        f'<div class="card"><dt>{escape(label)}</dt><dd>{value}</dd><p>{escape(note)}</p></div>' for label, value, note in cards
    )
    return f'<dl class="cards">{items}</dl>'


def _who(jobs: Sequence[str]) -> str:
    return jobs[0] if len(jobs) == 1 else f"{len(jobs)} jobs, the first {jobs[0]}"


def _problems(comparison: Leaderboard) -> str:
    """What kept jobs from completing, the jobs that share a reason on one line."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for run, name in zip(comparison.runs, comparison.names, strict=True):
        if not run.completed:
            reasons.setdefault((run.state, run.error or ""), []).append(name)
    items = []
    for (state, error), jobs in list(reasons.items())[:_REASONS]:
        who = _who(jobs)
        items.append(f"<li><b>{escape(who)}</b> {badge(state)} {escape(error)}</li>")
    items += [f"<li>left out: {escape(one_line(folder))} is a run of another program</li>" for folder in comparison.foreign[:3]]
    if len(comparison.foreign) > 3:
        items.append(f"<li>and {len(comparison.foreign) - 3} more of other programs</li>")
    left = sum(map(len, list(reasons.values())[_REASONS:]))
    more = f"<li>and {left} more in the table</li>" if left else ""
    return f'<ul class="problems">{"".join(items)}{more}</ul>' if items else ""


def _curves(comparison: Leaderboard) -> str:
    figures = []
    by_time = False
    for metric in METRICS:
        charts = {axis: collect(comparison.runs, metric, axis) for axis in AXES}
        by_time |= bool(charts["seconds"])
        drawn = "".join(svg(curves, metric, axis, len(comparison.runs)) for axis, curves in charts.items() if curves)
        if drawn:
            figures.append(f'<figure><figcaption>{metric}</figcaption>{drawn}<output class="tip"></output></figure>')
    if not figures:
        return ""
    chips = "".join(
        f'<button class="chip" data-j="{i}" aria-pressed="true"><i class="dot" style="background:'
        f'{colour(i, len(comparison.runs))}"></i>{escape(comparison.names[i])}</button>'
        for i, run in enumerate(comparison.runs[:_JOBS_IN_LEGEND])
        if len(run.metrics.train)
    )
    left = len(comparison.runs) - _JOBS_IN_LEGEND
    chips += f'<span class="more">and {left} more: point at a curve or at a row</span>' if left > 0 else ""
    axis = (
        '<fieldset class="switch"><legend>against</legend>'
        '<label><input type="radio" name="axis" value="samples" checked>samples</label>'
        '<label><input type="radio" name="axis" value="seconds">seconds</label></fieldset>'
    )
    content = f'<div class="chips">{chips}</div><div class="figures">{"".join(figures)}</div>'
    return _section("Curves", content, axis if by_time else "")


def _memory(comparison: Leaderboard) -> str:
    measured = [(i, run) for i, run in enumerate(comparison.runs) if run.memory]
    if not measured:
        return ""
    most = max(memory.peak_mb for _, run in measured for memory in run.memory)
    blocks = "".join(_bars(i, run, most, comparison) for i, run in measured[:_JOBS_WITH_BARS])
    left = len(measured) - _JOBS_WITH_BARS
    more = f'<p class="more">the first {_JOBS_WITH_BARS} of {len(measured)} jobs; all are in the table</p>' if left > 0 else ""
    return _section("Peak memory per device", f'<div class="memory">{blocks}</div>{more}')


def _bars(index: int, run: RunRecord, most: float, comparison: Leaderboard) -> str:
    paint = colour(index, len(comparison.runs))
    bars = "".join(
        f'<div class="row"><span>{escape(memory.label)}</span><span class="track">'
        f'<i style="width:{100 * memory.peak_mb / most:.1f}%;background:{paint}"></i></span>'
        f"<b>{memory.peak_mb:,.0f} MB{_busy(memory.busy)}</b></div>"
        for memory in run.memory
    )
    return f'<div class="job" data-j="{index}"><h3>{escape(comparison.names[index])}</h3>{bars}</div>'


def _busy(share: float | None) -> str:
    return "" if share is None else f", {share:.0f} % busy"


def _config(comparison: Leaderboard) -> str:
    if not comparison.config_keys:
        return ""
    lines = []
    for key in comparison.config_keys:
        values = Counter(show(row[key]) for row in comparison.rows)
        chips = "".join(
            f'<span class="value">{escape(value)}<small>×{times}</small></span>'
            for value, times in values.most_common(_VALUES_PER_KEY)
        )
        left = len(values) - _VALUES_PER_KEY
        chips += f'<span class="more">and {left} more values</span>' if left > 0 else ""
        lines.append(f"<tr><th scope='row'>{escape(key)}</th><td>{chips}</td></tr>")
    return _section("What differs", f'<div class="scroll"><table class="differs">{"".join(lines)}</table></div>')
