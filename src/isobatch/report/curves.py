"""The curves of the comparison: which there are, their axes, and each as inline SVG.

Paths use integer coordinates relative to the point before (two or three characters a number), which keeps 500 jobs
in a page of a few MB. Colours are CSS variables, so that the same SVG serves the light and the dark page.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isobatch.report.read import RunRecord

AXES = {"samples": "samples", "seconds": "time_s"}
METRICS = {"train/loss": "train", "eval/accuracy": "evals", "train/lr": "train"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 56, 14, 12, 34
_SCALE = 10  # path units per pixel: integers with a tenth of a pixel
_OWN_COLOURS = 10
_DASH = 7


@dataclass(frozen=True)
class Curve:
    """One job's curve; `index` is the job's place in the comparison, which fixes its colour."""

    index: int
    job: str
    x: np.ndarray
    y: np.ndarray


def collect(runs: Sequence[RunRecord], metric: str, axis: str) -> list[Curve]:
    """The curves of a metric against an axis ("samples" or "seconds"); runs that lack either are left out."""
    curves = []
    for index, run in enumerate(runs):
        series = getattr(run.metrics, METRICS[metric])
        if not len(series):
            continue
        x, y = series[AXES[axis]], series[metric]
        x, y = x[np.isfinite(x)], y[np.isfinite(x)]
        if np.isfinite(y).any():
            curves.append(Curve(index, run.job, x, y))
    return curves


def colour(index: int, count: int) -> str:
    """A CSS colour: one of ten named ones, or a place on a ramp of hues where there are more jobs than that."""
    if count <= _OWN_COLOURS:
        return f"var(--s{index})"
    return f"hsl({(255 - 225 * index / (count - 1)) % 360:.0f} 62% var(--ramp))"


@dataclass(frozen=True)
class Scale:
    """Maps values to 0..1, linearly or by logarithm."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def of(cls, values: np.ndarray, log_allowed: bool) -> Scale:
        finite = values[np.isfinite(values)]
        low, high = float(finite.min()), float(finite.max())
        if log_allowed and low > 0 and high / low > 30:
            return cls(low, high, log=True)
        margin = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
        return cls(low - margin if low < 0 or low > margin else 0.0, high + margin)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                values, low, high = np.log(values), math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        return (values - low) / (high - low)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = max(1, (last - first) // 5)
            marks = [m * 10.0**e for e in range(first, last + 1, every) for m in ((1,) if last - first > 2 else (1, 2, 5))]
        else:
            span = self.high - self.low
            unit = 10.0 ** math.floor(math.log10(span / 4))
            step = next(unit * m for m in (1, 2, 2.5, 5, 10) if span / (unit * m) <= 5.5)
            marks = [step * i for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [mark for mark in marks if self.low <= mark <= self.high]


def tick_text(value: float) -> str:
    """1200000 -> 1.2M, 0.00025 -> 2.5e-4: short enough for an axis."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    if value and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def path(x: np.ndarray, y: np.ndarray) -> str:
    """The `d` of a path through points in pixels; NaN lifts the pen, a lone point becomes a dot."""
    parts: list[str] = []
    before: tuple[int, int] | None = None
    for px, py in zip(np.round(x * _SCALE), np.round(y * _SCALE), strict=True):
        if not (math.isfinite(px) and math.isfinite(py)):
            before = None
            continue
        here = int(px), int(py)
        if before is None:
            parts.append(f"M{here[0]} {here[1]}h0")
        elif here != before:
            dx, dy = here[0] - before[0], here[1] - before[1]
            parts.append(f"l{dx}{dy}" if dy < 0 else f"l{dx} {dy}")
        before = here
    return "".join(parts)


def svg(curves: Sequence[Curve], metric: str, axis: str, count: int) -> str:
    """One chart as an SVG element. count: how many jobs the comparison has, for their colours."""
    every_y = np.concatenate([curve.y for curve in curves])
    across = Scale(0.0, max(max(float(curve.x.max()) for curve in curves), 1e-9))
    up = Scale.of(every_y, log_allowed="loss" in metric)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    grid, lines = [], []
    for tick, at in zip(up.ticks(), up(np.array(up.ticks())), strict=True):
        y = TOP + high * (1 - at)
        grid.append(f'<path class="grid" d="M{LEFT} {y:.1f}h{wide}"/>')
        grid.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick_text(tick)}</text>')
    for tick, at in zip(across.ticks(), across(np.array(across.ticks())), strict=True):
        x = LEFT + wide * at
        grid.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick_text(tick)}</text>')
    grid.append(f'<text class="unit" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{axis}</text>')
    paths = [path(LEFT + wide * across(c.x), TOP + high * (1 - up(c.y))) for c in curves]
    dashes = _dashes(paths)
    for curve, d, dash in reversed(list(zip(curves, paths, dashes, strict=True))):  # the best job on top
        lines.append(f'<path class="curve" data-j="{curve.index}" style="stroke:{colour(curve.index, count)}"{dash} d="{d}"/>')
    scales = f'data-x="{across.high:.9g}" data-y="{up.low:.9g},{up.high:.9g},{int(up.log)}"'
    frame = f'data-frame="{LEFT},{TOP},{wide},{high}"'
    name = html.escape(f"{metric} against {axis}", quote=True)
    return (
        f'<svg class="chart by-{axis}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}" {scales} {frame}>'
        f'{"".join(grid)}<g transform="scale({1 / _SCALE})">{"".join(lines)}</g>'
        f'<path class="cross" d=""/><circle class="spot" r="4" cx="-9" cy="-9"/></svg>'
    )


def _dashes(paths: Sequence[str]) -> list[str]:
    """Curves that are the same to the pixel would hide each other: they share the line in alternating dashes."""
    result = [""] * len(paths)
    for _, group in itertools.groupby(sorted(range(len(paths)), key=lambda i: (paths[i], i)), key=lambda i: paths[i]):
        same = list(group)
        if 1 < len(same) <= 6:
            for place, i in enumerate(same):
                on, off = _DASH * _SCALE, _DASH * _SCALE * (len(same) - 1)
                result[i] = f' stroke-dasharray="{on} {off}" stroke-dashoffset="{-on * place}"'
    return result
