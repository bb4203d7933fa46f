"""How a continued run is cut: its shards stay as they were, how many are held at once is free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch import config as configuration
from isobatch.batch_plan import Batch, BatchPlan, Since
from isobatch.resume import contract
from isobatch.scheduler import Schedule

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


def plan_of(saved: Saved) -> BatchPlan:
    """The windows that `saved` was trained with.

    Raises:
        DAMAGED: its plan is incomplete or cannot be.
    """
    before, tail = saved.state["plan"], saved.state["config"].get("sampler", {}).get("tail", "keep")
    effective, shard, order = before["effective_batch"], shard_of(before), before["samples_per_epoch"]
    since = Since(*before.get("since", ()))  # newer than some runs
    if any(type(n) is not int or n < 0 for n in (effective, shard, order, *since)) or not effective * shard * order:
        raise ValueError("a size in it is none")
    return BatchPlan(Batch(effective, shard, 1), order, tail, since)


def placed(plan: BatchPlan, saved: Saved) -> BatchPlan:
    """`plan`, beginning where the data of `saved` stopped; where it has other windows, at the same sample of the same epoch.

    Raises:
        DAMAGED: the plan of `saved` is incomplete or cannot be.
    """
    was = plan_of(saved)
    if _windows(was) == _windows(plan):
        return replace(plan, since=was.since)
    window = was.window(saved.step)
    return replace(plan, since=Since(saved.step, window.epoch, window.positions.start))


def place_notes(plan: BatchPlan, step: int) -> list[str]:
    """Where the data go on, if the windows change at `step`."""
    if not step or plan.since.step != step:
        return []
    return [f"from step {step} on there are other windows: the data go on at sample {plan.since.position} of epoch "
            f"{plan.since.epoch + 1}, and epochs and schedule go by samples"]  # fmt: skip


def schedule_notes(config: Config, saved: Saved, total: int, plan: BatchPlan) -> list[str]:
    """What another length of the run does to the learning rate."""
    before, update = saved.state["plan"].get("steps"), saved.state["counters"]["update"]
    if before == total or type(before) is not int or before < 1:
        return []
    old, new = (Schedule(config.scheduler, n, windows.windows_per_epoch, windows.ahead)(min(update, n))
                for n, windows in ((before, plan_of(saved)), (total, plan)))  # fmt: skip
    text = f"{total} steps instead of {before}: the {config.scheduler.name} schedule is laid over all"
    if old == new:
        return [f"{text}, which changes nothing here"]
    return [f"{text}, so the learning rate goes on at {new:.4g} of its peak instead of {old:.4g}"]


def _windows(plan: BatchPlan) -> tuple[Any, ...]:
    """What the positions of the windows follow from."""
    return plan.batch.effective, plan.order_size, plan.tail, plan.tail == "pad" and plan.batch.num_shards


def shard_of(plan: Mapping[str, Any]) -> Any:
    """The shard of a saved plan; before it was stated it was the micro batch."""
    return plan.get("shard", plan.get("micro_batch"))


def key(config: Config, was: Mapping[str, Any]) -> str:
    """The setting to name where the shards have changed."""
    before = (was.get("batch") or {}).get("shard")
    return "batch.micro" if before is None and config.batch.shard is None else "batch.shard"
