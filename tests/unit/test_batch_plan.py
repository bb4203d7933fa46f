"""The cut, by property: every window is the order's slice, its shards share it out, and stock DDP is the special case."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from isobatch.batch_plan import Batch, BatchPlan, resolve_batch
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
    together = batch.micro_steps(range(batch.num_replicas), lanes)
    assert sorted(v for shards in together for v in shards) == list(range(batch.num_shards))


def feed(plan: BatchPlan, replicas: range, order: torch.Tensor) -> Feed:
    return Feed(None, plan, lambda epoch: order, replicas, 1)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("given_", "key", "says"),
    [
        ((48, 8, 2, 1), "accumulation.steps", "takes 6 micro steps, not 2"),
        ((None, None, None, 1), "batch.effective", "neither"),
        ((8, 16, None, 1), "batch.micro", "more than batch.effective=8"),
        ((0, None, None, 1), "batch.effective", "positive"),
    ],
)
def test_contradictions_are_refused(given_: tuple[int | None, ...], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refusal:
        resolve_batch(*given_)  # type: ignore[arg-type]
    assert refusal.value.key == key


def test_an_epoch_smaller_than_a_window_under_drop_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing is left"):
        BatchPlan(Batch(8, 8, 1), 5, "drop")
