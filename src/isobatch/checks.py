"""Range checks for option dataclasses: each raises the one line that a person can act on."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from isobatch.errors import ConfigError

Size = int | tuple[int, int] | list[int]  # of an image: a side, or height and width


def sides(size: Size) -> tuple[int, int]:
    """(height, width)."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def as_option(size: Size | None) -> Any:
    """A size as an option states it."""
    return list(size) if isinstance(size, tuple) else size


# what OmegaConf says of a value of the wrong type -> what it should have been
KINDS = {"converted to Integer": "no whole number", "converted to Float": "no number", "not a ListConfig": "no list",
         "to Dict[": "no group of settings", "not a valid bool": "neither true nor false"}  # fmt: skip
LARGEST = 2**31 - 1  # of a count: what torch and the operating system take


def choice(key: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        names = ", ".join("null" if a is None else str(a).lower() if isinstance(a, bool) else str(a) for a in allowed)
        raise ConfigError(key, value, "is not a valid choice", f"choose one of {names}")


def positive(key: str, value: Any, most: int = LARGEST) -> None:
    """Raise ConfigError unless `value` > 0 (NaN fails too), and a whole number at most `most`."""
    if not value > 0:
        raise ConfigError(key, value, "must be positive", f"set {key} to 1 or more" if isinstance(value, int) else
                          f"set {key} above 0")  # fmt: skip
    if isinstance(value, int) and value > most:
        raise ConfigError(key, value, f"is more than {most}", f"set {key} to a number that can be meant")


def within(key: str, value: float, low: float, high: float) -> None:
    """Raise ConfigError unless low <= value <= high (NaN fails too)."""
    if not low <= value <= high:
        raise ConfigError(key, value, f"is not between {low:g} and {high:g}", f"set {key} into that range")


def complaint(text: str) -> str:
    """OmegaConf's `text` about a value, in words for a person who has not read OmegaConf."""
    return next((f"is {kind}" for said, kind in KINDS.items() if said in text), text)


def way_to_option(prefix: str, key: str, known: Collection[str], table: Mapping[str, Any]) -> str:
    """What a person may have meant with an option that the choice in use does not have.

    Args:
        prefix: `parallel.`, empty for the top level. known: the options that there are.
        table: the group's choices; empty where there is no group. One that has the option is more likely than a slip of a key.
    """
    group = prefix.rstrip(".")
    having = sorted(name for name, cls in table.items() if key in {f.name for f in dataclasses.fields(cls)})
    if having:
        return f"leave it out, or set {group}={' or '.join(having)}, which {'has' if len(having) == 1 else 'have'} it"
    near = difflib.get_close_matches(key, known, n=1) or sorted(known)
    return f"did you mean {prefix}{', '.join(near)}" if near else "leave it out"
