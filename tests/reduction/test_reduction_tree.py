"""The tree's brackets are those of the window, on every plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reduction_ranks import Gradients, bits, tree_sum

from isobatch.batch_plan import Batch
from isobatch.reduction.tree import cover, parents, split


def reference(leaves: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The tree in five lines."""
    if len(leaves) == 1:
        return leaves[0]
    middle = split(0, len(leaves))
    left, right = reference(leaves[:middle]), reference(leaves[middle:])
    return right if left is None else left if right is None else left + right


def spans(num_shards: int, num_ranks: int) -> list[range]:
    batch = Batch(num_shards, 1, num_ranks)
    return [batch.shards_of(rank) for rank in range(num_ranks)]


def random_gradients(seed: int, num_shards: int, missing: float, dtype=torch.float32, spread: float = 3.0) -> Gradients:
    make = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        scale = torch.exp(spread * torch.randn(shape, generator=make))
        return (torch.randn(shape, generator=make) * scale).to(dtype)

    def shard(chance: float) -> list[torch.Tensor | None]:
        whole = [draw(7), draw(2, 3, 2, 2).contiguous(memory_format=torch.channels_last), draw()]
        return [None if torch.rand((), generator=make) < chance else value for value in whole]

    shards: Gradients = [shard(missing) for _ in range(num_shards)]
    shards[int(torch.randint(num_shards, (), generator=make))] = shard(0.0)
    return shards


@given(st.integers(1, 13), st.integers(0, 3), st.integers(1, 15), st.integers(0, 2**20),
       st.sampled_from([0.0, 0.3, 0.9]), st.sampled_from([torch.float32, torch.float64]))  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_the_same_bits_on_every_rank_of_every_plan(num_filled, empty, num_ranks, seed, missing, dtype) -> None:
    gradients = random_gradients(seed, num_filled, missing, dtype)
    expected = bits([reference(list(column)) for column in zip(*gradients, strict=True)])
    for results in tree_sum(gradients, spans(num_filled + empty, num_ranks)):
        assert bits(results) == expected


def test_half_gradients_are_added_in_float32() -> None:
    gradients = random_gradients(1, 6, 0.0, torch.bfloat16, 1.0)
    (first, *others) = (bits(r) for n in (1, 2, 4) for r in tree_sum(gradients, spans(6, n)))
    assert all(other == first for other in others)
    wide = [[g.float() for g in shard] for shard in gradients]
    assert bits(tree_sum(wide, spans(6, 1))[0]) == first


def test_a_chain_is_not_the_same_on_every_plan() -> None:
    """What the tree replaces does differ, so these tests can."""
    gradients = random_gradients(3, 6, 0.0)

    def chain(shards: range) -> torch.Tensor:
        total = gradients[shards[0]][0].clone()
        for shard in shards[1:]:
            total += gradients[shard][0]
        return total

    one, two = chain(range(6)), chain(range(3)) + chain(range(3, 6))
    assert bits([one]) != bits([two])


def test_a_missing_gradient_is_left_out_and_keeps_signed_zeros() -> None:
    zero = torch.tensor([-0.0])
    gradients: Gradients = [[None], [zero], [None], [None], [None]]
    for num_ranks in (1, 2, 3, 5, 6):
        for results in tree_sum(gradients, spans(5, num_ranks)):
            assert bits(results) == bits([zero])


@pytest.mark.parametrize("values", [
    [1e30, 1e-30, -1e30, 1e-30], [1e-45, 1e-45, 1e-45, -1e-45], [3e38, 3e38, -3e38, 1.0], [float("inf"), 1.0, 2.0, 3.0],
    [float("inf"), float("-inf"), 0.0, 1.0], [float("nan"), 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0],
])  # fmt: skip
def test_extreme_gradients_behave_as_in_a_plain_sum(values) -> None:
    gradients: Gradients = [[torch.tensor([v, 1e-30])] for v in values]
    plain = torch.tensor([sum(float(torch.tensor(v)) for v in values)]).float()
    results = [r[0] for n in (1, 2, 3, 4, 5) for r in tree_sum(gradients, spans(4, n))]
    for result in results:
        assert torch.equal(result[1], torch.tensor(4e-30))
        if torch.isfinite(plain).all() and abs(values[0]) < 1e30:
            assert torch.equal(result[:1], plain)
        assert bits([result.nan_to_num(7.0)]) == bits([results[0].nan_to_num(7.0)])
    if not torch.isfinite(torch.tensor(values)).all():
        assert not torch.isfinite(results[0][0])


@given(st.integers(1, 200), st.data())
@settings(max_examples=60, deadline=None)
def test_a_range_of_shards_is_covered_by_few_whole_nodes(num_shards, data) -> None:
    start = data.draw(st.integers(0, num_shards))
    mine = range(start, data.draw(st.integers(start, num_shards)))
    nodes = cover(mine, 0, num_shards)
    assert [v for a, b in nodes for v in range(a, b)] == list(mine)
    assert len(nodes) <= max(1, 2 * num_shards.bit_length())
    assert all(node in parents(0, num_shards) or node == (0, num_shards) for node in nodes)


def test_aligned_plans_send_one_partial_sum_per_rank() -> None:
    for num_ranks in (1, 2, 4, 8):
        assert [len(cover(s, 0, 8)) for s in spans(8, num_ranks)] == [1] * num_ranks
