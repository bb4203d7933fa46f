"""How a continued run is cut: its shards stay as they were, how many are held at once is free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch import config as configuration
from isobatch.resume import contract

if TYPE_CHECKING:
    from isobatch.checkpoint.reading import Saved
    from isobatch.config import Config

CUT = {"shard", "micro_batch", "num_shards"}  # compared by a rule of their own, not as identity
DAMAGED = KeyError, TypeError, ValueError, AttributeError, OverflowError  # what a plan of somebody's hand leads to


class Cut(NamedTuple):
    """What batch_plan.resolve_batch is given; `micro` may be `auto` still."""

    effective: int | None
    micro: Any
    accumulation: int | None
    shard: int | None


def typed(config: Config) -> Cut:
    return Cut(config.batch.effective, config.batch.micro, config.accumulation.steps, config.batch.shard)


def continued(config: Config, saved: Saved) -> Cut:
    """What is not typed anew stays: the shards as they were cut, a micro batch of at most what was held at once; the
    accumulation follows from both on any number of replicas.

    Raises:
        DAMAGED: the plan of `saved` is incomplete.
    """
    effective, micro, accumulation, _ = typed(config)
    before, was = saved.state["plan"], saved.state["config"]
    effective = before["effective_batch"] if effective is None else effective
    unit, held = min(int(shard_of(before)), effective), min(int(before["micro_batch"]), effective)
    shard = stated(config, was)
    if isinstance(micro, int) and micro == was["batch"]["micro"] and micro < (shard or 1):
        micro = None  # not typed anew, and out of date
    if accumulation == (was.get("accumulation") or {}).get("steps"):
        accumulation = None
        if (micro is None and held >= (shard or 1)) or (micro == "auto" and shard is None):
            micro = held
    if shard is None and isinstance(micro, int) and micro % unit == 0:
        shard = unit  # as it was cut, however many are held at once now
    return Cut(effective, micro, accumulation, shard)


def stated(config: Config, was: Mapping[str, Any]) -> int | None:
    """The shard that `config` states for the continuation of a run whose config `was`."""
    shard: int | None = config.batch.shard
    if "shard" in (was.get("batch") or {}) or shard != configuration.BatchOptions().shard or config.allow_contract_change:
        return shard
    return contract.EARLIER["batch"]["shard"]  # type: ignore[no-any-return]  # the default of today does not speak for it


def shard_of(plan: Mapping[str, Any]) -> Any:
    """The shard of a saved plan; before it was stated it was the micro batch."""
    return plan.get("shard", plan.get("micro_batch"))


def key(config: Config, was: Mapping[str, Any]) -> str:
    """The setting to name where the shards have changed."""
    before = (was.get("batch") or {}).get("shard")
    return "batch.micro" if before is None and config.batch.shard is None else "batch.shard"
