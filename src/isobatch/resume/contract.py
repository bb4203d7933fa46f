"""Which settings are the contract that a resumed run keeps, and which are the plan that it may change.

Everything is contract unless the option says otherwise (marks.py). The batch is compared by its numbers, not by how it was
typed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobatch.config import marked
from isobatch.config.tables import MARKS, TABLES

# options whose default has changed, or that are newer than some runs -> what those runs did; a resumed run goes on like that
EARLIER: dict[str, dict[str, Any]] = {
    "data": {"exif": "ignore"},
    "ema": {"warmup": False},
    "batch": {"shard": None},  # before it could be stated, a shard was as large as the micro batch
}
# options that null leaves to the weights: a run that goes on takes them from itself, so null changes nothing
OPEN = {"data": ("image_size", "eval_size", "crop_pct", "interpolation", "mean", "std")}


@dataclass(frozen=True)
class ContractChange:
    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {shown(self.before)} -> {shown(self.now)}"


def shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[ContractChange]:
    """Contract settings in which two resolved plain configs differ.

    An option that only one side knows was added or removed between versions and says nothing; when the choice of a
    group differs, its options are not compared one by one.
    """
    found: list[ContractChange] = []
    top = marked.top_level()
    for key in now:
        if key not in before:
            continue
        held = (MARKS[key] if key in TABLES else top.get(key, marked.TOP)).resume == "contract"
        old, new = before[key], now[key]
        if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
            if held and not same(old, new):
                found.append(ContractChange(key, old, new))
        elif key not in TABLES:
            continue  # batch, sweep, cost
        elif old.get("name") != new.get("name"):
            if held:
                found.append(ContractChange(f"{key}.name", old.get("name"), new.get("name")))
        else:
            own, old = marked.group_options(key, new.get("name")), {**EARLIER.get(key, {}), **old}
            found += [ContractChange(f"{key}.{option}", old[option], new[option]) for option in new
                      if option in old and own.get(option, MARKS[key]).resume == "contract"
                      and not (new[option] is None and option in OPEN.get(key, ()))
                      and not same(old[option], new[option])]  # fmt: skip
    return found


def same(before: Any, now: Any) -> bool:
    """Equal, also where an earlier release kept a number as the text that it came as."""
    if not isinstance(before, str) or isinstance(now, str):
        return bool(before == now)
    word = {"true": True, "false": False, "null": None, "none": None}
    if before.lower() in word:
        return now is word[before.lower()]
    try:
        return float(before) == float(now) if not isinstance(now, bool) else False
    except (TypeError, ValueError):
        return False


def facts_changed(before: Mapping[str, Any], now: Mapping[str, Any], keys: Mapping[str, str]) -> list[ContractChange]:
    """Numbers of the plan in which two runs differ; `keys`: fact -> the setting to name."""
    return [ContractChange(setting, before[fact], now[fact]) for fact, setting in keys.items()
            if fact in before and before[fact] != now[fact]]  # fmt: skip
