"""The order of an epoch: stock torch's for shuffle and sequential; repeats and draws told apart for the others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from isobatch import sampler
from isobatch.batch_plan import Batch, BatchPlan
from isobatch.data.feed import Feed
from isobatch.errors import ConfigError
from isobatch.permutation import Permutation
from isobatch.sampler import Blocks, Computed, Repeated, Sequential, Shuffle, Weighted


def no_targets() -> torch.Tensor:
    return torch.zeros(0)


@pytest.mark.parametrize(("sampler", "shuffle"), [(Shuffle(), True), (Sequential(), False)])
@pytest.mark.parametrize("n", [1, 7, 60])
def test_the_order_is_bit_for_bit_the_stock_samplers(sampler: Any, shuffle: bool, n: int) -> None:
    orders = []
    for epoch in range(3):
        stock = DistributedSampler(range(n), 1, 0, shuffle=shuffle, seed=5)  # type: ignore[arg-type]
        stock.set_epoch(epoch)
        orders.append(sampler.order(epoch, n, 5, no_targets).tolist())
        assert orders[-1] == list(stock)
    assert (orders[0] != orders[1]) == (shuffle and n > 1)


def test_repeated_numbers_the_repeats_of_each_sample() -> None:
    order = Repeated(repeats=3).order(0, 12, 0, no_targets)
    assert len(order) == 12 == len(set(order.tolist())), "each repeat has an index, and so a seed, of its own"
    samples = (order % 12).view(4, 3)
    assert (samples == samples[:, :1]).all() and len(set(samples[:, 0].tolist())) == 4
    assert (order // 12).view(4, 3).tolist() == [[0, 1, 2]] * 4


def test_weighted_draws_classes_evenly_and_numbers_what_it_draws_twice() -> None:
    targets = torch.tensor([0] * 90 + [1] * 10)
    order = Weighted(samples=2000).order(0, 100, 0, lambda: targets)
    assert len(set(order.tolist())) == 2000, "two draws share an index, and so a seed"
    share = targets[order % 100].double().mean().item()
    assert 0.45 < share < 0.55
    assert not order.equal(Weighted(samples=2000).order(1, 100, 0, lambda: targets))
    with pytest.raises(ConfigError, match="class labels"):
        Weighted().order(0, 3, 0, lambda: torch.rand(3))


def test_more_samples_than_torch_draws_from_are_weighted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = torch.tensor([0] * 90 + [1] * 10)
    expected = Weighted(samples=2000).order(0, 100, 0, lambda: targets)
    monkeypatch.setattr(sampler, "MOST_CATEGORIES", 99)
    monkeypatch.delattr(torch, "multinomial")  # it refuses so many
    order = Weighted(samples=2000).order(0, 100, 0, lambda: targets)
    assert len(set(order.tolist())) == 2000
    assert (order % 100 == expected % 100).double().mean() > 0.99, "the same draw, up to rounding"


@pytest.mark.parametrize(("n", "block", "mix"), [(100, 10, 3), (97, 10, 4), (5, 10, 2), (64, 8, 100)])
def test_blocks_are_shuffled_and_read_from_few_places_at_a_time(n: int, block: int, mix: int) -> None:
    order, again, other = (Blocks(block=block, mix=mix).order(epoch, n, 3, no_targets) for epoch in (0, 0, 1))
    assert sorted(order.tolist()) == list(range(n)) and order.equal(again) and not order.equal(other)
    for b in range(-(-n // block)):  # all of a block is read within one group of `mix`
        positions = (order // block == b).nonzero().flatten()
        assert positions[-1] - positions[0] < block * mix
    if mix < -(-n // block):
        assert (order // block)[: block * mix].unique().numel() <= mix
    if n > block:
        assert (order // block)[:block].unique().numel() > 1, "blocks are not mixed"
        assert not order.equal(order.sort().values)


def test_blocks_come_in_a_random_order() -> None:
    blocks = Blocks(block=4, mix=1).order(0, 40, 3, no_targets).view(10, 4) // 4
    assert (blocks == blocks[:, :1]).all()
    assert blocks[:, 0].tolist() != list(range(10))


@pytest.mark.parametrize("n", [1, 2, 7, 60, 1000, 16385, 40000])
def test_a_computed_order_has_every_sample_once_and_any_part_of_it_at_once(n: int) -> None:
    order, other = (Computed().order(epoch, n, 5, no_targets) for epoch in (0, 1))
    whole = order[0:n]
    assert sorted(whole.tolist()) == list(range(n)) and len(order) == n and order.max() == n - 1
    assert n < 60 or not whole.equal(other[0:n])
    for part in (slice(n // 2, n), slice(1, n, 3), slice(n, n)):
        assert order[part].equal(whole[part])
    assert order[0 : n + 5].tolist() == (whole.tolist() * 6)[: n + 5], "what is padded begins anew"
    assert order[0:n].equal(Computed().order(0, n, 5, no_targets)[0:n]), "the same in every process"


def test_a_computed_order_is_that_of_every_machine_and_release() -> None:
    order = Computed().order(3, 10**9, 7, no_targets)
    assert order[999_999_990:999_999_995].tolist() == [728019170, 317148764, 670936749, 249055085, 302873249]
    first = torch.arange(3).numpy().astype("uint64")
    assert Permutation(2**31 - 1, 0, 0)(first).tolist() == [730054284, 1759120432, 1700331215]


def test_all_orders_of_a_few_samples_are_equally_likely() -> None:
    """Chi squared of 6,000 epochs over the 120 orders of 5 samples: 119, give or take 15."""
    positions = torch.arange(5).numpy().astype("uint64")
    seen = Counter(tuple(Permutation(5, 0, epoch)(positions).tolist()) for epoch in range(6_000))
    assert len(seen) == 120 and sum((count - 50) ** 2 / 50 for count in seen.values()) < 119 + 5 * 15.4


def test_computed_draws_are_balanced_and_told_apart() -> None:
    targets = torch.tensor([0] * 90 + [1] * 10)
    order = Computed(balanced=True, samples=20_000).order(0, 100, 0, lambda: targets)
    drawn = order[0:20_000]
    assert len(set(drawn.tolist())) == 20_000 and drawn.max() <= order.max()
    assert 0.48 < targets[drawn % 100].double().mean().item() < 0.52
    counts = torch.bincount(drawn % 100, minlength=100)
    assert counts.min() > 60 and (counts[90:] > 5 * counts[:90].max()).all()
    large = Computed(balanced=True, samples=2**31 - 1).order(0, 100, 0, lambda: targets)
    assert large[2**31 - 3 : 2**31 - 1].tolist() == [v % 100 + 100 * p for v, p in zip(
        large[2**31 - 3 : 2**31 - 1].tolist(), (2**31 - 3, 2**31 - 2), strict=True)]  # fmt: skip
    beyond = Computed(balanced=True, samples=2**33).order(0, 100, 0, lambda: targets)
    assert (beyond[2**33 - 2 : 2**33] // 100).tolist() == [2**33 - 2, 2**33 - 1] and len(beyond) == 2**33
    with pytest.raises(ConfigError, match="64 bits"):
        Computed(balanced=True, samples=2**40).order_size(2**23)
    with pytest.raises(ConfigError, match=r"sampler\.samples=2147483648: .*sampler=computed"):
        Weighted(samples=2**31)
    with pytest.raises(ConfigError, match="class labels"):
        Computed(balanced=True).order(0, 3, 0, lambda: torch.rand(3))
    with pytest.raises(ConfigError, match=r"sampler\.samples=4: .*sampler\.balanced=true"):
        Computed(samples=4)


@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
def test_shards_of_a_computed_order_are_those_of_its_table(tail: str) -> None:
    """Whoever holds a shard, and wherever a resumed run begins, reads what the whole order would give it."""
    n, plan = 1000, BatchPlan(Batch(48, 7, 2), 1000, tail)
    computed = Computed().order(0, n, 3, no_targets)
    feeds = [Feed(None, plan, lambda epoch, order=order: order, range(2), 1)  # type: ignore[arg-type, misc]
             for order in (computed, computed[0:n])]  # fmt: skip
    for step in (0, 5, plan.windows_per_epoch - 1):
        window = plan.window(step)
        for shard in range(window.num_shards):
            ours, table = (feed.shard_indices(window, shard) for feed in feeds)
            assert ours.equal(table)
        assert feeds[0].highest(0) == n - 1


def test_passes_of_a_computed_order_are_orders_of_their_own() -> None:
    order = Computed(passes=3).order(2, 50, 7, no_targets)
    whole = order[0:150]
    assert len(order) == 150 == len(set(whole.tolist())) and whole.max() <= order.max()
    for k in range(3):
        assert (whole[50 * k : 50 * k + 50] - 50 * k).equal(Computed().order(6 + k, 50, 7, no_targets)[0:50])
    drawn = Computed(passes=2, balanced=True, samples=500).order(0, 10, 0, lambda: torch.arange(10) % 3)[0:1000]
    assert len(set(drawn.tolist())) == 1000
