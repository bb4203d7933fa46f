"""Digests: every bit counts, wherever and however it lies; and whose bits are off."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isobatch.audit import digest
from isobatch.audit.judge import RankDigests, Suspects, judge
from isobatch.precision.scaling import LossScaler
from isobatch.train.state import TrainState

GOOD, BAD, WORSE = (1, 2, 3), (1, 5, 3), (1, 6, 7)


@pytest.mark.parametrize(
    ("results", "suspects"),
    [
        ([(0, GOOD), (1, GOOD)], None),
        ([(0, GOOD), (1, BAD), (2, GOOD)], Suspects((1,), True, (1,))),  # a third rank decides
        ([(0, BAD), (1, GOOD), (2, GOOD)], Suspects((0,), True, (1,))),
        ([(0, BAD), (1, GOOD), (0, GOOD), (1, GOOD)], Suspects((0,), True, (1,))),  # it was off once
        ([(0, GOOD), (1, BAD), (0, GOOD), (1, BAD)], Suspects((0, 1), False, (1,))),  # both insist
        ([(0, BAD), (1, GOOD), (2, WORSE)], Suspects((0, 1, 2), False, (1, 2))),
        ([(0, GOOD), (1, GOOD[:2]), (2, GOOD)], Suspects((1,), True, (0, 1, 2))),
    ],
)
def test_who_is_off(results: list, suspects: Suspects | None) -> None:
    assert judge([RankDigests(rank, digests) for rank, digests in results]) == suspects


def test_the_order_in_which_things_follow_from_one_another_tells_the_first() -> None:
    found = judge([RankDigests(0, (1, 2, 3)), RankDigests(1, (9, 8, 3)), RankDigests(2, (1, 2, 3))], [2, 1, 0])
    assert found == Suspects((1,), True, (1, 0))


def one(tensor: torch.Tensor | None) -> int:
    (found,) = digest.of([tensor])
    return found


def test_a_digest_sees_every_bit() -> None:
    base = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    seen = {one(base)}
    for place in (0, 1, 500, 999):
        for bit in range(32):
            other = base.clone()
            other.view(torch.int32)[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
            seen.add(one(other))
    assert len(seen) == 129
    assert one(base.flip(0)) != one(base) and one(base[:999]) != one(base)
    assert one(torch.tensor([0.0])) != one(torch.tensor([-0.0])) and one(torch.zeros(4)) != one(torch.zeros(5))
    assert one(None) == one(torch.zeros(0)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8,
                                   torch.bool, torch.complex64])  # fmt: skip
def test_of_every_type(dtype: torch.dtype) -> None:
    value = torch.tensor([1, 0, 1, 1]).to(dtype)
    other = value.clone()
    other[2] = 0
    assert one(value) == one(value.clone()) != one(other)


def test_how_it_lies_in_memory_and_what_it_is_added_with_is_no_matter() -> None:
    images = torch.randn(4, 3, 8, 8)
    assert one(images) == one(images.contiguous(memory_format=torch.channels_last)) == one(images.mT.contiguous().mT)
    many = [torch.randn(n) for n in (1, 70_000, 3, 200_001, 65_536, 2)]
    assert digest.of(many) == [one(tensor) for tensor in many]


def test_so_is_how_many_pieces_are_mixed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (1, 2 * digest.PIECE, 2 * digest.PIECE + 1, 7 * digest.PIECE + 3)
    many = [torch.randn(n) for n in sizes]
    found = digest.of(many)
    monkeypatch.setattr(digest, "_pieces", lambda device: 3)
    monkeypatch.setattr(digest, "_memory", {})
    assert digest.of(many) == found


def test_by_hand_in_python_s_integers() -> None:
    """A digest that changed would make every chain of an older run another one."""
    mask, low = (1 << 64) - 1, (1 << 32) - 1

    def mixed(word: int) -> int:
        x = word * digest.MIX & mask
        return x ^ x >> 32

    values = torch.randn(2 * digest.PIECE + 1001, generator=torch.Generator().manual_seed(1))
    bits = [b & low for b in values.view(torch.int32).tolist()] + [0]
    total = 0
    for place, word in enumerate(high << 32 | under for under, high in zip(bits[::2], bits[1::2], strict=True)):
        number, place = divmod(place, digest.PIECE)
        weight = mixed((place + 1) * digest.STRIDE) * digest.STRIDE | 1
        total += mixed(word) * weight * (2 * number * digest.STRIDE + 1)
    total += len(values) * digest.STRIDE
    assert digest.text(one(values)) == f"{total & mask:016x}"
    assert digest.text(one(torch.arange(3, dtype=torch.float32))) == "ab6f6991902bd099"


def test_one_nan_is_as_good_as_another_and_infinity_is_itself() -> None:
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert one(quiet[:1]) == one(quiet[1:])
    assert len({one(torch.tensor([v])) for v in (torch.inf, -torch.inf, torch.nan, torch.finfo(torch.float32).max)}) == 4


def test_a_state_s_digest_names_weights_optimizer_average_and_counters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model, optimizer, LossScaler(None))
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()

    def now() -> dict[str, int]:
        found = digest.StateDigest(digest.parts_of(state))
        return dict(zip(found.names, found.values(), strict=True))

    before = now()
    assert {"model.0.weight", "model.1.running_var", "optimizer.0.weight.exp_avg", "scaler", "counters"} <= set(before)

    def changed() -> set[str]:
        return {name for name, value in now().items() if value != before[name]}

    assert changed() == set()
    optimizer.state[model[0].bias]["exp_avg_sq"].view(torch.int32)[1] ^= 1
    assert changed() == {"optimizer.0.bias.exp_avg_sq"}
    model[1].running_mean[0] += 1
    state.update += 1
    assert changed() == {"optimizer.0.bias.exp_avg_sq", "model.1.running_mean", "counters"}
