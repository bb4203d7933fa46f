"""How a value is shown to people, everywhere in the report."""

from __future__ import annotations

from isobatch.report.config_columns import Cell


def show(value: Cell) -> str:
    """A cell for people: four significant digits, a dash for what is unknown."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)
