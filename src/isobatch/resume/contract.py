"""Which settings are the contract that a resumed run keeps, and which are the plan that it may change.

Everything is contract unless it is listed here. The batch is compared by its numbers, not by how it was typed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# top-level keys and groups that do not decide what is trained: hardware, bookkeeping, and what has a rule of its own
# (batch: its numbers; epochs and steps: the length; what changes bits only: the identity)
FREE = {
    "task", "resume", "allow_contract_change", "imports", "log_every", "log_weights", "eval_every", "threads",
    "deterministic", "compile", "channels_last", "on_nonfinite", "epochs", "steps", "batch", "parallel", "accumulation",
    "reduction", "precision", "device", "checkpoint", "logger", "experiment", "plan", "sweep",
    "cost",
}  # fmt: skip
# within groups that are contract otherwise: where and how, not what
FREE_OPTIONS = {
    "data": {"root", "num_workers", "prefetch", "prefetch_factor", "pin_memory", "persistent_workers", "cache",
             "cache_dir", "download", "timeout_s", "worker_timeout_s"},
    "model": {"pretrained", "checkpoint_path", "grad_checkpointing"},  # where the first weights came from is past
    "optimizer": {"fused", "foreach"},
    "ema": {"device"},
}  # fmt: skip


# options whose default has changed, or that are newer than some runs -> what those runs did; a resumed run goes on like that
EARLIER: dict[str, dict[str, Any]] = {"data": {"exif": "ignore"}}


@dataclass(frozen=True)
class Difference:
    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {shown(self.before)} -> {shown(self.now)}"


def shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Contract settings in which two resolved plain configs differ.

    An option that only one side knows was added or removed between versions and says nothing; when the choice of a
    group differs, its options are not compared one by one.
    """
    found: list[Difference] = []
    for key in now:
        if key in FREE or key not in before:
            continue
        old, new = before[key], now[key]
        if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
            if old != new:
                found.append(Difference(key, old, new))
        elif old.get("name") != new.get("name"):
            found.append(Difference(f"{key}.name", old.get("name"), new.get("name")))
        else:
            free, old = FREE_OPTIONS.get(key, set()), {**EARLIER.get(key, {}), **old}
            found += [Difference(f"{key}.{option}", old[option], new[option]) for option in new
                      if option in old and option not in free and old[option] != new[option]]  # fmt: skip
    return found


def facts_changed(before: Mapping[str, Any], now: Mapping[str, Any], keys: Mapping[str, str]) -> list[Difference]:
    """Numbers of the plan in which two runs differ; `keys`: fact -> the setting to name."""
    return [Difference(setting, before[fact], now[fact]) for fact, setting in keys.items()
            if fact in before and before[fact] != now[fact]]  # fmt: skip
