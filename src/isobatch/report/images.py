"""The curves and the memory bars as PNG files, for documents and chats. One figure per metric, never per job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.report.curves import AXES, collect
from isobatch.report.table import Leaderboard

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = {"train/loss": "loss", "eval/accuracy": "accuracy", "train/lr": "lr"}
_JOBS_IN_LEGEND, _JOBS_WITH_BARS = 12, 40
_COLOURS = [
    "#2f6bff",
    "#f0760b",
    "#0ea58a",
    "#d6336c",
    "#7c4dff",
    "#8a9500",
    "#00a3d7",
    "#b5651d",
    "#64748b",
    "#e0218a",
]


def write_images(comparison: Leaderboard, folder: Path) -> list[Path]:
    """Writes loss.png, accuracy.png, lr.png and memory.png, as far as there is something to draw."""
    # Agg by name and no pyplot: no display is needed and no global figure is left behind in a training process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []

    def save(figure: Any, name: str) -> None:
        FigureCanvasAgg(figure)
        figure.savefig(folder / name, dpi=110)
        written.append(folder / name)

    for metric, name in _NAMES.items():
        charts = {axis: collect(comparison.runs, metric, axis) for axis in AXES}
        charts = {axis: curves for axis, curves in charts.items() if curves}
        if charts:
            beside = max((len(_cut(name)) for name in comparison.names), default=0) / 14  # inches that the legend takes
            figure = Figure(figsize=(6.2 * len(charts) + beside, 3.6), layout="constrained")
            for place, (axis, curves) in enumerate(charts.items()):
                axes = figure.add_subplot(1, len(charts), place + 1)
                _draw(axes, curves, metric, axis, len(comparison.runs))
            _legend(figure, next(iter(charts.values())), comparison)
            save(figure, f"{name}.png")
    if any(run.memory for run in comparison.runs):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        _draw_memory(figure.add_subplot(), comparison)
        save(figure, "memory.png")
    return written


def _cut(name: str, longest: int = 44) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def _colour(index: int, count: int) -> Any:
    from matplotlib import colormaps

    return _COLOURS[index] if count <= len(_COLOURS) else colormaps["viridis"](0.92 * index / (count - 1))


def _plain(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", parse_math=False)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#00000018", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _draw(axes: Axes, curves: list[Any], metric: str, axis: str, count: int) -> None:
    from matplotlib.collections import LineCollection

    # One collection for all curves: 500 Line2D objects would take a second per chart.
    lines = [np.column_stack([curve.x, curve.y]) for curve in reversed(curves)]
    axes.add_collection(LineCollection(lines, colors=[_colour(c.index, count) for c in reversed(curves)], linewidths=1.3))
    values = np.concatenate([curve.y for curve in curves])
    finite = values[np.isfinite(values)]
    if "loss" in metric and finite.min() > 0 and finite.max() / finite.min() > 30:
        axes.set_yscale("log")
    axes.autoscale_view()
    _plain(axes, metric, axis, "")


def _legend(figure: Any, curves: list[Any], comparison: Leaderboard) -> None:
    """Beside the charts, where it covers no curve."""
    if len(curves) > _JOBS_IN_LEGEND:
        return
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=_colour(c.index, len(comparison.runs))) for c in curves]
    legend = figure.legend(handles, [_cut(comparison.names[c.index]) for c in curves], frameon=False, fontsize=8,
                           loc="outside right upper")  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may hold a $


def _draw_memory(axes: Axes, comparison: Leaderboard) -> None:
    runs = [(i, run) for i, run in enumerate(comparison.runs) if run.memory][:_JOBS_WITH_BARS]
    for place, (index, run) in enumerate(runs):
        width = 0.8 / len(run.memory)
        x = [place - 0.4 + width * (i + 0.5) for i in range(len(run.memory))]
        axes.bar(x, [m.peak_mb for m in run.memory], width * 0.9, color=_colour(index, len(comparison.runs)))
    labels = [_cut(comparison.names[index], 24) for index, _ in runs]
    level = len(runs) * max(map(len, labels), default=0) <= 90  # characters that the width of the figure takes
    axes.set_xticks(range(len(runs)), labels, parse_math=False, rotation=0 if level else 90, fontsize=8)
    _plain(axes, "peak memory per device", "", "MB")
