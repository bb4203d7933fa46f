"""The picture of a learning rate range test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def plot(path: Path, found: Sequence[tuple[float, float]], losses: Sequence[float], steepest: float) -> None:
    """
    Args:
        found: (learning rate, loss) of each step. losses: smoothed. steepest: the rate at which they fall fastest.
    """
    # Agg by name and no pyplot: no display is needed and no global figure is left behind
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([lr for lr, _ in found], [loss for _, loss in found], color="#64748b", linewidth=0.6, label="loss")
    axes.plot([lr for lr, _ in found], losses, color="#2f6bff", label="smoothed")
    axes.axvline(steepest, color="#f0760b", linestyle="--", label=f"falls fastest: {steepest:.2g}")
    low = min(*losses, *(loss for _, loss in found))
    span = max(losses) - low if losses[0] == low else losses[0] - low  # what diverges is of no interest
    axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
    if span:
        axes.set_ylim(low - 0.1 * span, losses[0] + 0.4 * span)
    axes.legend()
    figure.savefig(path, dpi=110)
