"""The order of an epoch: stock torch's for shuffle and sequential; repeats and draws told apart for the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from isobatch import sampler
from isobatch.errors import ConfigError
from isobatch.sampler import Blocks, Repeated, Sequential, Shuffle, Weighted


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
