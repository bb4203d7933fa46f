"""bin64's sum does not know an order; its units are checked, and a miss is run again."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reduction_ranks import Gradients, bin_sum, bits, settled_bin_sum
from test_reduction_tree import random_gradients

from isobatch.reduction import bin64
from isobatch.reduction.bin64 import Units


def units_for(gradients: Gradients) -> Units:
    return Units(len(gradients[0]), len(gradients))


def random_owners(generator: torch.Generator, num_shards: int, num_ranks: int) -> list[list[int]]:
    owners: list[list[int]] = [[] for _ in range(num_ranks)]
    for shard in torch.randperm(num_shards, generator=generator).tolist():
        owners[int(torch.randint(num_ranks, (), generator=generator))].append(shard)
    return owners


@given(st.integers(1, 13), st.integers(1, 9), st.integers(0, 2**20), st.sampled_from([0.0, 0.4]),
       st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.sampled_from([0.0, 2.0, 12.0]))  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_any_order_and_any_grouping_give_the_same_bits(num_shards, num_ranks, seed, missing, dtype, spread) -> None:
    gradients = random_gradients(seed, num_shards, missing, dtype, spread)
    expected = bits(settled_bin_sum(gradients, [list(range(num_shards))], units_for(gradients))[0])
    owners = random_owners(torch.Generator().manual_seed(seed), num_shards, num_ranks)
    for result in settled_bin_sum(gradients, owners, units_for(gradients)):
        assert bits(result) == expected


def ties(num_shards: int, dtype=torch.float32) -> Gradients:
    """Gradients that lie halfway between two multiples of the unit, next to odd multiples that turn the sum's parity."""
    make = torch.Generator().manual_seed(0)
    exponent = 20 - 48 + bin64.GROWTH + 1  # what `Units` takes for a largest gradient of 2^20, with six shards
    half = 2.0 ** (exponent - 1)
    odd = 2 * torch.randint(-(2**20), 2**20, (num_shards, 64), generator=make) + 1
    values = (odd.double() * half * torch.tensor([1.0, 2.0] * (num_shards // 2)).unsqueeze(1)).to(dtype)
    values[:, 0] = 2.0**20
    return [[value] for value in values]


def test_ties_go_away_from_zero_whatever_the_sum_so_far() -> None:
    gradients = ties(6)
    expected = bits(settled_bin_sum(gradients, [[0, 1, 2, 3, 4, 5]], units_for(gradients))[0])
    for owners in ([[5, 4, 3, 2, 1, 0]], [[0, 2], [1, 3, 4, 5]], [[3], [1], [0, 5], [2, 4]], [[], [5, 0, 1, 4, 2, 3]]):
        assert bits(settled_bin_sum(gradients, owners, units_for(gradients))[0]) == expected


def test_without_the_tie_break_the_order_shows(monkeypatch) -> None:
    """The tie-break is needed, and the test above can fail."""
    monkeypatch.setattr(bin64, "TIE_BREAK", 1.0)
    gradients = ties(6)
    found = set()
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 4, 1, 5, 3]):
        units = units_for(gradients)
        units.exponents = [units.wanted(2.0**20)]
        total = bin64.BinSum(*_one_rank(gradients, units))
        total.begin(6)
        for shard in order:
            total.leaf(shard, [gradients[shard][0].clone()])
        found.add(total.sum.numpy().tobytes())
    assert len(found) > 1


def _one_rank(gradients: Gradients, units: Units):
    from reduction_ranks import bucket_of

    from isobatch.reduction.exchange import Scratch

    return bucket_of(gradients, 1), 0, 0, 1, units, Scratch()


@pytest.mark.parametrize("magnitude", [2.0**-120, 1e-20, 1.0, 1e20, 2.0**120])
def test_the_sum_is_the_exact_one_up_to_the_unit(magnitude) -> None:
    gradients = random_gradients(5, 8, 0.0, spread=1.0)
    for shard in gradients:
        for value in shard:
            value.mul_(magnitude)
    units = units_for(gradients)
    (result,) = settled_bin_sum(gradients, [list(range(8))], units)
    for k, (value, exponent) in enumerate(zip(result, units.exponents, strict=True)):
        columns = [shard[k].reshape(-1).tolist() for shard in gradients]
        for i, got in enumerate(value.reshape(-1).tolist()):
            exact = sum((Fraction(column[i]) for column in columns), Fraction(0))
            bound = 8 * Fraction(2) ** exponent / 2 + Fraction(abs(got)) / 2**24 + Fraction(1, 2**149)
            assert abs(Fraction(got) - exact) <= bound


def test_a_gradient_that_outgrows_its_unit_is_run_again() -> None:
    small: Gradients = [[torch.full((4,), 1e-3)] for _ in range(4)]
    large: Gradients = [[torch.full((4,), 1e3)] for _ in range(4)]
    units = units_for(small)
    assert not _run(small, units) or units.reruns == 0
    settled_bin_sum(small, [[0, 1, 2, 3]], units)
    before = units.reruns
    assert not _run(large, units)
    assert units.reruns == before + 1
    assert _run(large, units)
    assert torch.equal(settled_bin_sum(large, [[0, 1, 2, 3]], units)[0][0], torch.full((4,), 4e3))


def _run(gradients: Gradients, units: Units) -> bool:
    _, largest = bin_sum(gradients, [list(range(len(gradients)))], units)
    return units.check(largest)


def test_a_unit_far_too_coarse_is_run_again_and_zeros_change_no_unit() -> None:
    units = Units(1, 4)
    settled_bin_sum([[torch.full((4,), 1.0)]] * 4, [[0, 1, 2, 3]], units)
    known, reruns = list(units.exponents), units.reruns
    assert _run([[torch.zeros(4)]] * 4, units)
    assert units.exponents == known
    assert not _run([[torch.full((4,), 2.0**-20)]] * 4, units)
    assert _run([[torch.full((4,), 2.0**-20)]] * 4, units)
    assert units.reruns == reruns + 1


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so_and_the_rest_is_right(bad) -> None:
    make = torch.Generator().manual_seed(2)
    gradients: Gradients = [[torch.randn(5, generator=make) * 1e6] for _ in range(5)]
    gradients[3][0][1] = bad
    results = [settled_bin_sum(gradients, owners, units_for(gradients))[0][0]
               for owners in ([[0, 1, 2, 3, 4]], [[4, 3], [2, 0, 1]], [[1], [], [0, 2], [3, 4]])]  # fmt: skip
    for result in results:
        assert not torch.isfinite(result[1])
        assert bits([result[[0, 2, 3, 4]]]) == bits([results[0][[0, 2, 3, 4]]])
        assert torch.allclose(result[[0, 2, 3, 4]], torch.stack([g[0] for g in gradients]).sum(0)[[0, 2, 3, 4]])


def test_a_sum_beyond_float32_is_infinite_as_in_a_plain_sum() -> None:
    gradients: Gradients = [[torch.tensor([3e38, 1.0])] for _ in range(3)]
    (result,) = settled_bin_sum(gradients, [[0, 1, 2]], units_for(gradients))
    assert result[0].tolist()[0] == math.inf


def test_float64_gradients_beyond_the_units_become_infinite() -> None:
    gradients: Gradients = [[torch.tensor([1e308], dtype=torch.float64)] for _ in range(2)]
    (result,) = settled_bin_sum(gradients, [[0, 1]], units_for(gradients))
    assert result[0].item() == math.inf


def test_subnormal_gradients_are_added() -> None:
    gradients: Gradients = [[torch.tensor([1e-45, 3e-45])] for _ in range(3)]
    (result,) = settled_bin_sum(gradients, [[0, 1, 2]], units_for(gradients))
    assert torch.equal(result[0], torch.tensor([1e-45, 3e-45]) * 3)
