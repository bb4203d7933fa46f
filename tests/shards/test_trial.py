"""A model whose samples meet in its forward is found before it trains, wherever they meet."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from isobatch.shards.layout import Layout
from isobatch.shards.trial import Findings, examine, known

CPU = torch.device("cpu")
KINDS = [Layout((4, 4, 4)), Layout((4, 3, 3)), Layout((2,) * 7), Layout((4, 4), False)]


class Inside(nn.Module):
    """`part` between two layers, behind a gate that is closed at first."""

    def __init__(self, part: Any, gate: float = 1.0):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(6, 6), part, nn.Linear(6, 3)
        self.gate = nn.Parameter(torch.tensor(gate))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.gate * self.part(x))


class Function(nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Counting(nn.BatchNorm1d):
    """Batch norm by hand, as some have their own."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(0), x.var(0, unbiased=False)
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
        return (x - mean) / (var + 1e-5).sqrt()


class TokensFirst(nn.BatchNorm1d):
    """(N, C) as (T, N, C / T) flattened: its rows are as many, and in another order."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(len(x), 3, 2).transpose(0, 1)
        return super().forward(rows.flatten(0, 1)).view(rows.shape).transpose(0, 1).flatten(1)


GOOD = {
    "batch norm": lambda: nn.BatchNorm1d(6), "dropout": lambda: nn.Dropout(0.5), "layer norm": lambda: nn.LayerNorm(6),
    "noise": lambda: Function(lambda x: x + torch.rand_like(x)), "shuffled within": lambda: Function(
        lambda x: x[torch.randperm(len(x))]),
    "attention": lambda: Function(lambda x: nn.functional.scaled_dot_product_attention(*[x.view(-1, 3, 2)] * 3,
                                                                                      dropout_p=0.3).flatten(1)),
}  # fmt: skip
BAD = {
    "own batch norm": (lambda: Counting(6), "module part is"),
    "mean over the batch": (lambda: Function(lambda x: x - x.mean(0)), "module part is"),
    "reversed": (lambda: Function(lambda x: x.flip(0)), "module part is"),
    "tokens first": (lambda: TokensFirst(2), "module part"),
    "one draw": (lambda: Function(lambda x: x * torch.rand(1)), "rand draws (1,) numbers"),
    "a decision": (lambda: Function(lambda x: x if torch.rand(()) < 0.5 else 2 * x), "draws () numbers"),
    "Python's": (lambda: Function(lambda x: x * random.random()), "Python's or NumPy's generator"),
    "NumPy's": (lambda: Function(lambda x: x * float(numpy.random.rand())), "Python's or NumPy's generator"),
    "largest": (lambda: Function(lambda x: x / x.abs().max()), "module part is"),
    "not finite": (lambda: Function(lambda x: x / (len(x) > 4)), "module part is inf off"),
}


def samples() -> Tensor:
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", GOOD)
def test_what_can_be_told_apart_may_run_together(name: str) -> None:
    torch.manual_seed(0)
    found = examine(Inside(GOOD[name]()), samples(), KINDS, CPU)
    assert found == (None, name != "layer norm")


@pytest.mark.parametrize("gate", [1.0, 0.0])
@pytest.mark.parametrize("name", BAD)
def test_what_couples_samples_is_named_behind_a_closed_gate_too(name: str, gate: float) -> None:
    torch.manual_seed(0)
    make, said = BAD[name]
    reason = examine(Inside(make(), gate), samples(), KINDS[:1], CPU).coupling
    assert reason is not None and said in reason, reason


def test_an_output_for_all_samples_together_is_named() -> None:
    found = examine(Function(lambda x: (x, x.mean())), samples(), KINDS[:1], CPU)
    assert "gives () numbers for 12 samples together" in str(found.coupling)


def test_well_known_layers_need_no_trial() -> None:
    plain = nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    assert known(plain) == Findings(None, False)
    assert (
        known(nn.Sequential(plain, nn.BatchNorm1d(3))) == known(nn.Sequential(nn.Dropout(0.1), plain)) == Findings(None, True)
    )
    assert known(nn.Sequential(plain, Counting(3))) is None
    assert known(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), plain)) is None
    plain[1].register_forward_hook(lambda module, args, output: output - output.mean(0))
    assert known(plain) is None


def test_a_kind_of_forward_that_is_bad_alone_is_enough() -> None:
    only_five = Function(lambda x: x - x.mean(0) if len(x) == 10 else x)
    assert examine(Inside(only_five), samples(), KINDS[:1], CPU).coupling is None
    assert "module part is" in str(examine(Inside(only_five), samples(), KINDS, CPU).coupling)


def test_a_trial_leaves_nothing_behind() -> None:
    model = nn.Sequential(Inside(nn.BatchNorm1d(6)), nn.Dropout(0.5), Function(lambda x: x * random.random()))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    hooks = [len(m._forward_hooks) for m in model.modules()]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert examine(model, samples(), KINDS, CPU).coupling
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[1:]
