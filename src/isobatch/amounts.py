"""Lengths of a run in the unit that a person thinks in: `500` updates, `5ep` epochs, `5%` or `0.05` of the run."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from isobatch.errors import ConfigError

FORM = re.compile(r"([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(ep|%)?")
MOST = 1e12  # updates


def amount(key: str, value: Any) -> int | float | str:
    """`value` of an option as a number (updates; below 1 a fraction of the run), or as text with its unit.

    Raises:
        ConfigError: it is neither.
    """
    way_out = f"set {key} to updates (500), epochs (5ep) or a share of the run (5% or 0.05)"
    if isinstance(value, str) and (found := FORM.fullmatch(value.strip())):
        number, unit = found.groups()
        if unit is None:
            value = int(number) if number.isdigit() else float(number)
        elif float(number) <= (100 if unit == "%" else MOST):
            return f"{number}{unit}"
        else:
            raise ConfigError(key, value, "is more than the whole run" if unit == "%" else "is too long", way_out)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(key, value, "is no length of a run", way_out)
    if not 0 <= value <= MOST:  # NaN fails too
        raise ConfigError(key, value, f"is not between 0 and {MOST:g}", way_out)
    return value


def period(key: str, value: Any) -> int | float | str:
    """`value` of an option that says how often, as `amount` gives it: at least one update."""
    length = amount(key, value)
    if float(length.rstrip("ep%") if isinstance(length, str) else length) == 0:
        raise ConfigError(
            key, value, "must be positive", f"set {key} to updates (500), epochs (5ep) or a share of the run (5%)"
        )
    return length


def in_steps(value: Any) -> bool:
    """Whether a period, as typed, counts from the first step, and not from the end of an epoch (null is one epoch)."""
    return value is not None and not str(value).strip().endswith("ep")


def read(options: Any, group: str, lists: tuple[str, ...] = ()) -> None:
    """Each length that frozen `options` name in `amounts` as `amount` gives it, for their `__post_init__`; null stays.

    Args:
        lists: those that are lists of lengths.
    """
    for key in options.amounts:
        value = getattr(options, key)
        if key in lists:
            object.__setattr__(options, key, [amount(f"{group}.{key}", point) for point in value])
        elif value is not None:
            object.__setattr__(options, key, amount(f"{group}.{key}", value))


def updates(value: int | float | str, total: int, per_epoch: int = 0) -> int:
    """`value`, as `amount` gives it, in updates of a run of `total`.

    Args:
        per_epoch: updates of an epoch (0: nothing is in epochs).
    """
    if isinstance(value, str):
        number, unit = FORM.fullmatch(value).groups()  # type: ignore[union-attr]
        share = float(number) / 100 * total if unit == "%" else float(number) * per_epoch
        return round(share)
    return round(value * total) if value < 1 else math.floor(value)


def in_updates(options: Any, total: int, per_epoch: int) -> Any:
    """`options` with the lengths that they name in `amounts` in updates."""
    made: dict[str, Any] = {}
    for key in getattr(options, "amounts", ()):
        value = getattr(options, key)
        if isinstance(value, list):
            made[key] = [updates(point, total, per_epoch) for point in value]
        elif value is not None:
            made[key] = max(int(key == "every"), updates(value, total, per_epoch))
    return dataclasses.replace(options, **made) if made else options


def lengths_in_updates(config: Any, total: int, per_epoch: int) -> Any:
    """`config` with the lengths that it and its groups name in updates of a run of `total`."""
    made = {group: in_updates(getattr(config, group), total, per_epoch) for group in ("ema", "augment", "checkpoint")}
    if config.eval_every is not None:
        made["eval_every"] = max(1, updates(config.eval_every, total, per_epoch))
    return dataclasses.replace(config, **made)
