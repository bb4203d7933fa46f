"""Whose bits are off: majorities of digests, and repetitions where there are only two."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isobatch.audit.digest import leaves, of_state, of_tensor
from isobatch.audit.judge import Computation, Suspects, compare_states, judge
from isobatch.precision.scaling import LossScaler
from isobatch.train.state import TrainState

GOOD, BAD, WORSE = ({"loss": "l", "head.weight": value} for value in ("g", "b", "w"))


@pytest.mark.parametrize(
    ("computations", "suspects"),
    [
        ([(0, GOOD), (1, GOOD)], None),
        ([(0, GOOD), (1, BAD), (2, GOOD)], Suspects((1,), True, "head.weight")),  # a third rank decides
        ([(0, BAD), (1, GOOD), (2, GOOD)], Suspects((0,), True, "head.weight")),
        ([(0, BAD), (1, GOOD), (0, GOOD), (1, GOOD)], Suspects((0,), True, "head.weight")),  # it was off once
        ([(0, GOOD), (1, BAD), (0, GOOD), (1, BAD)], Suspects((0, 1), False, "head.weight")),  # both insist
        ([(0, BAD), (1, GOOD), (2, WORSE)], Suspects((0, 1, 2), False, "head.weight")),
    ],
)
def test_who_is_off(computations: list, suspects: Suspects | None) -> None:
    assert judge([Computation(rank, digests) for rank, digests in computations]) == suspects


def test_the_first_thing_that_differs_is_named() -> None:
    states = [{"model.a": "1", "model.b": "2", "optimizer.a": "3"} for _ in range(4)]
    assert compare_states(states) is None
    states[2] |= {"model.b": "x", "optimizer.a": "y"}
    assert compare_states(states) == Suspects((2,), True, "model.b")
    assert compare_states([states[0], states[2]]) == Suspects((0, 1), False, "model.b")


def test_a_tensor_s_digest_sees_every_bit_its_dtype_and_its_shape() -> None:
    base = torch.arange(6, dtype=torch.float32)
    others = [base.view(2, 3), base.double(), base.to(torch.int32), -base, torch.cat([base[:5], torch.tensor([5.0000005])])]
    assert len({of_tensor(t) for t in [base, *others]}) == 6
    assert of_tensor(base.view(2, 3)) == of_tensor(base.view(2, 3).t().contiguous().t())  # how it lies in memory is no matter
    assert of_tensor(torch.tensor(0.0)) != of_tensor(torch.tensor(-0.0))
    assert of_tensor(None) == "" and len(of_tensor(torch.empty(0))) == 16
    assert of_tensor(torch.ones(2, dtype=torch.bfloat16)) != of_tensor(torch.ones(2, dtype=torch.float16))


def test_a_state_s_digest_names_weights_optimizer_and_counters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model, optimizer, LossScaler(None))
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    before = of_state(state)
    assert {"model.0.weight", "model.1.running_var", "optimizer.0.weight.exp_avg", "scaler", "counters"} <= set(before)

    def changed() -> set[str]:
        return {name for name, digest in of_state(state).items() if digest != before[name]}

    assert changed() == set()
    optimizer.state[model[0].bias]["exp_avg_sq"].view(torch.int32)[1] ^= 1
    assert changed() == {"optimizer.0.bias.exp_avg_sq"}
    state.update += 1
    assert changed() == {"optimizer.0.bias.exp_avg_sq", "counters"}


def test_leaves_of_a_nest() -> None:
    assert dict(leaves({"b": [1, {"x": 2}], "a": None}, "s")) == {"s.a": None, "s.b.0": 1, "s.b.1.x": 2}
