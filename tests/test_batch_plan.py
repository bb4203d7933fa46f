"""The cut, by property: every window is the order's slice, its shards share it out, and stock DDP is the special case."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from isobatch.batch_plan import Batch, BatchPlan, Since, resolve_batch
from isobatch.data.feed import Feed
from isobatch.errors import ConfigError

COUNTS = st.integers(1, 40)


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    effective = draw(COUNTS)
    batch = Batch(effective, draw(st.integers(1, effective)), draw(st.integers(1, 9)))
    tail = draw(st.sampled_from(["keep", "drop", "pad"]))
    size = draw(st.integers(effective if tail == "drop" else 1, 130))
    return BatchPlan(batch, size, tail)


@settings(max_examples=150, deadline=None)
@given(plans())
def test_windows_are_slices_of_the_order_and_shards_share_them_out(plan: BatchPlan) -> None:
    consumed = 0
    for step in range(plan.windows_per_epoch):
        window = plan.window(step)
        assert list(window.positions) == list(range(consumed, consumed + window.size))
        assert window.size == plan.batch.effective or step == plan.windows_per_epoch - 1
        shards = [list(window.shard(v)) for v in range(window.num_shards)]
        assert sorted(p for shard in shards for p in shard) == list(window.positions)
        assert max(map(len, shards)) <= plan.batch.micro
        assert max(map(len, shards)) - min(map(len, shards)) <= 1
        assert [bool(shard) for shard in shards] == [v < window.num_filled for v in range(window.num_shards)]
        assert plan.samples_before(step) == consumed
        consumed += window.size
    assert consumed == plan.epoch_size
    assert plan.window(plan.windows_per_epoch).epoch == 1 and plan.window(plan.windows_per_epoch).positions.start == 0
    if plan.tail == "keep":
        assert consumed == plan.order_size
    elif plan.tail == "drop":
        assert consumed == plan.order_size - plan.order_size % plan.batch.effective
    else:
        assert consumed % plan.batch.num_shards == 0 and 0 <= consumed - plan.order_size < plan.batch.num_shards
    smallest = min(len(plan.window(s).shard(v)) for s in range(plan.windows_per_epoch)
                   for v in range(plan.window(s).num_filled))  # fmt: skip
    assert plan.smallest_shard() == smallest


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(1, 3))
def test_replicas_cover_every_shard_once_with_even_load(plan: BatchPlan, lanes: int) -> None:
    batch = plan.batch
    mine = [list(batch.shards_of(replica)) for replica in range(batch.num_replicas)]
    assert sorted(v for shards in mine for v in shards) == list(range(batch.num_shards))
    assert max(map(len, mine)) == batch.accumulation_steps
    assert max(map(len, mine)) - min(map(len, mine)) <= 1
    for filled in (batch.num_shards, plan.window(plan.windows_per_epoch - 1).num_filled):
        together = batch.micro_steps(range(batch.num_replicas), lanes, filled)
        assert sorted(v for step in together for shards in step for v in shards) == list(range(filled))
        assert max(len(shards) for step in together for shards in step) <= batch.at_once
        loads = [len(batch.shards_of(replica, filled)) for replica in range(batch.num_replicas)]
        assert max(loads) - min(loads) <= 1, "4 samples of a small tail on two replicas are 2 and 2, not 3 and 1"


def feed(plan: BatchPlan, replicas: range, order: torch.Tensor) -> Feed:
    source: Any = SimpleNamespace(reads_on=torch.device("cpu"))
    return Feed(source, plan, lambda epoch: order, replicas, 1)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_indices_and_weights_of_all_replicas_make_up_each_window(plan: BatchPlan) -> None:
    order = torch.randperm(plan.order_size, generator=torch.Generator().manual_seed(1))
    feeds = [feed(plan, range(r, r + 1), order) for r in range(plan.batch.num_replicas)]
    padded = order.repeat(plan.epoch_size // len(order) + 1)[: plan.epoch_size]
    for step in range(plan.windows_per_epoch):
        window = plan.window(step)
        requests = [request.indices for f in feeds for request in f.requests(step, step + 1)]
        assert all(len(indices) for indices in requests), "an empty request"
        expected = padded[window.positions.start : window.positions.stop]
        assert torch.cat(requests).sort().values.equal(expected.sort().values)
        weights = [len(indices) / window.size for indices in requests]
        assert sum(weights) == pytest.approx(1, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 60), world=st.integers(1, 7), micro=st.integers(1, 6), shuffle=st.booleans(),
       tail=st.sampled_from(["drop", "pad"]), epoch=st.integers(0, 3), seed=st.integers(0, 5))  # fmt: skip
def test_one_process_per_shard_is_the_stock_sampler(n: int, world: int, micro: int, shuffle: bool, tail: str, epoch: int,
                                                    seed: int) -> None:  # fmt: skip
    """DistributedSampler with batches of `micro`; its drop_last drops samples, ours a whole window, so that is compared
    where both keep the same samples (n a multiple of the window)."""
    from isobatch.sampler import Sequential, Shuffle

    if tail == "drop":
        n = max(1, n // (world * micro)) * world * micro
    sampler = (Shuffle if shuffle else Sequential)(tail=tail)
    plan = BatchPlan(Batch(world * micro, micro, world), sampler.order_size(n), tail)
    order = sampler.order(epoch, n, seed, lambda: torch.zeros(0))
    for rank in range(world):
        stock = DistributedSampler(range(n), world, rank, shuffle=shuffle, seed=seed, drop_last=tail == "drop")  # type: ignore[arg-type]
        stock.set_epoch(epoch)
        expected = torch.tensor(list(stock)).split(micro)
        found = [request.indices for request in feed(plan, range(rank, rank + 1), order).requests(0, plan.windows_per_epoch)]
        assert [b.tolist() for b in found] == [b.tolist() for b in expected]


@settings(max_examples=100, deadline=None)
@given(effective=COUNTS, replicas=st.integers(1, 8), accumulation=st.integers(1, 8))
def test_what_is_left_open_follows(effective: int, replicas: int, accumulation: int) -> None:
    batch = resolve_batch(effective, None, accumulation, replicas)
    assert batch.effective == effective and batch.num_shards * batch.micro >= effective
    assert batch.accumulation_steps <= accumulation
    assert resolve_batch(effective, batch.micro, None, replicas) == batch
    assert resolve_batch(None, batch.micro, accumulation, replicas).effective == batch.micro * accumulation * replicas


@settings(max_examples=200, deadline=None)
@given(effective=COUNTS, shard=st.integers(1, 12), replicas=st.integers(1, 8), accumulation=st.none() | st.integers(1, 12),
       micro=st.none() | st.integers(1, 60))  # fmt: skip
def test_a_stated_shard_is_never_changed_by_the_others(effective: int, shard: int, replicas: int, accumulation: int | None,
                                                       micro: int | None) -> None:  # fmt: skip
    alone = resolve_batch(effective, None, None, 1, shard)
    unit = min(shard, effective)
    if micro is not None and not unit <= micro <= effective:
        with pytest.raises(ConfigError, match="has no room for a shard" if micro < unit else "is more than batch.effective"):
            resolve_batch(effective, micro, None, replicas, shard)
        return
    batch = resolve_batch(effective, micro, None if micro else accumulation, replicas, shard)
    assert (batch.effective, batch.shard, batch.num_shards, batch.stated) == (effective, unit, alone.num_shards, True)
    assert batch.micro <= (micro or effective) and batch.at_once * unit >= batch.micro
    assert batch.at_once <= max(batch.busiest, 1)
    if micro:
        assert batch.at_once == min(micro // unit, batch.busiest)
    elif accumulation:  # as little at once as so many micro steps allow
        assert batch.accumulation_steps <= accumulation or batch.at_once == 1
        assert batch.at_once == 1 or -(-batch.busiest // (batch.at_once - 1)) > accumulation
    else:
        assert batch.accumulation_steps == 1
    steps = batch.micro_steps(range(replicas), 1)
    sizes = [len(shards) for (shards,) in steps]
    assert max(sizes) <= batch.at_once
    for replica in range(replicas):
        mine = [shards for (shards,) in batch.micro_steps(range(replica, replica + 1), 1)]
        assert [v for shards in mine for v in shards] == list(batch.shards_of(replica))
        assert not mine or max(map(len, mine)) - min(map(len, mine)) <= 1
        for filled in range(batch.num_shards + 1):
            assert batch.steps_with(replica, filled) == len(batch.micro_steps(range(replica, replica + 1), 1, filled))
    assert batch.on(3) == resolve_batch(effective, None, None, 3, shard) or batch.on(3).at_once <= batch.at_once


def test_the_plan_in_words() -> None:
    assert str(resolve_batch(256, 32, None, 4, 8)) == "effective 256 = 32 shards of 8; 4 replicas x 2 micro steps of 4 shards"
    assert str(resolve_batch(48, None, None, 1, 8)) == "effective 48 = 6 shards of 8; 1 replica x 1 micro step of 6 shards"
    assert str(resolve_batch(44, None, 4, 1, 8)) == "effective 44 = 6 shards of up to 8; 1 replica x 3 micro steps of 2 shards"
    # evened out: nobody trains on 32
    assert str(resolve_batch(48, None, None, 1, 32)) == "effective 48 = 2 shards of 24; 1 replica x 1 micro step of 2 shards"
    assert str(resolve_batch(48, 24, None, 4, 8)) == "effective 48 = 6 shards of 8; 4 replicas x 1 micro step of up to 2 shards"
    assert str(resolve_batch(48, 16, None, 1)) == "effective 48 = 3 shards of 16; 1 replica x 3 micro steps of 1 shard"


@pytest.mark.parametrize(
    ("given_", "key", "says"),
    [
        ((48, 8, 2, 1), "accumulation.steps", "takes 6 micro steps, not 2"),
        ((None, None, None, 1), "batch.effective", "neither"),
        ((8, 16, None, 1), "batch.micro", "more than batch.effective=8"),
        ((0, None, None, 1), "batch.effective", "positive"),
        ((48, 4, None, 1, 8), "batch.micro", "no room for a shard of batch.shard=8"),
        ((None, 4, None, 1, 8), "batch.micro", "no room for a shard of batch.shard=8"),
        ((48, 24, 1, 1, 8), "accumulation.steps", "takes 2 micro steps, not 1"),
        ((48, None, None, 1, 0), "batch.shard", "positive"),
    ],
)
def test_contradictions_are_refused(given_: tuple[int | None, ...], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refusal:
        resolve_batch(*given_)  # type: ignore[arg-type]
    assert refusal.value.key == key


def test_an_epoch_smaller_than_a_window_under_drop_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing is left"):
        BatchPlan(Batch(8, 8, 1), 5, "drop")


@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
@pytest.mark.parametrize(("size", "before", "after"), [
    (10, (4, 2), (6, 3)), (23, (2, 1), (6, 2)), (12, (6, 2), (2, 1)), (9, (4, 4), (4, 1)),
])  # fmt: skip
def test_another_batch_goes_on_where_the_data_stopped(tail: str, size: int, before: tuple[int, int],
                                                      after: tuple[int, int]) -> None:  # fmt: skip
    was = BatchPlan(Batch(*before, 1), size, tail)
    for step in range(2 * was.windows_per_epoch + 1):
        stopped = was.window(step)
        now = BatchPlan(Batch(*after, 1), size, tail, Since(step, stopped.epoch, stopped.positions.start))
        first, end = stopped.positions.start, stopped.epoch + 1
        for later in range(step, now.ahead + end * now.windows_per_epoch):
            window = now.window(later)
            assert (window.step, window.epoch, window.positions.start) == (later, stopped.epoch, first) and window.size > 0
            first = window.positions.stop
        left = first - stopped.positions.start
        rest = max(0, size - stopped.positions.start)
        pad = -(-rest // now.batch.num_shards) * now.batch.num_shards
        assert left == {"keep": rest, "drop": rest - rest % after[0], "pad": pad}[tail]
        follows = now.window(now.ahead + end * now.windows_per_epoch)
        assert (follows.epoch, follows.positions.start) == (end, 0)
    assert BatchPlan(Batch(*after, 1), size, tail).ahead == 0
