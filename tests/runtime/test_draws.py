"""Draws outside a shard's forward: the same on all ranks, on every plan, and after a resume."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from harness import rows, train, train_ranks
from precision_probes import QUIET, data_of, model_of
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from isobatch.runtime.randomness import ShardSeeder, code_of, draws, draws_on_host

pytestmark = pytest.mark.filterwarnings("ignore:.*opt_einsum")  # kron wishes for it
KRON = ("logger=none", "threads=1", "model=mlp", "model.width=8", "model.depth=1", "scheduler=constant", "epochs=null",
        "batch.effective=8", "batch.micro=2",
        "batch.shard=null", "eval_every=100", "optimizer.opt=kron", "optimizer.lr=0.01")  # fmt: skip


def final(record: Any) -> list[float]:
    return record.weights[-1]  # type: ignore[no-any-return]


@pytest.fixture
def drawing() -> Iterator[tuple[str, ...]]:
    """Words of a training whose optimizer draws noise for every gradient, as own code may."""

    def noise(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p), alpha=0.01 + 0.01 * random.random() + 0.01 * float(numpy.random.rand()))

    hook = register_optimizer_step_pre_hook(noise)
    yield (*(word for word in KRON if "optimizer.opt" not in word), "optimizer=sgd")
    hook.remove()


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_what_draws_in_an_update_draws_alike_on_all_ranks(tmp_path: Path, drawing: tuple[str, ...], reduction: str) -> None:
    words = (*drawing, f"reduction={reduction}", "steps=4")
    one, two = train_ranks(2, tmp_path / "ranks", *words)
    assert one.weights == two.weights
    if reduction == "exact":
        assert one.weights == train(tmp_path / "alone", *words).weights


def test_what_draws_in_an_update_goes_on_where_it_was(tmp_path: Path, drawing: tuple[str, ...]) -> None:
    whole = train(tmp_path / "whole", *drawing, "steps=4")
    train(tmp_path / "part", *drawing, "steps=2")
    assert final(train(tmp_path / "again", *drawing, "steps=4", f"resume={tmp_path / 'part'}")) == final(whole)


@pytest.mark.slow  # kron compiles its update, which takes a minute
def test_kron_draws_alike_and_goes_on_where_it_was(tmp_path: Path) -> None:
    words = (*KRON, "++optimizer.kwargs.stochastic_weight_decay=true", "optimizer.weight_decay=0.1")
    one, two = train_ranks(2, tmp_path / "ranks", *words, "steps=4")
    assert one.weights == two.weights
    whole = train(tmp_path / "whole", *words, "steps=4")
    train(tmp_path / "part", *words, "steps=2")
    assert final(train(tmp_path / "again", *words, "steps=4", f"resume={tmp_path / 'part'}")) == final(whole)


class Noisy(nn.Module):
    """Draws from torch, NumPy and Python whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        noise = 0.5 * torch.randn_like(inputs) + random.gauss(0, 0.3) + float(numpy.random.normal(0, 0.3))
        return self.layer(inputs + noise)  # type: ignore[no-any-return]


def test_a_model_that_draws_in_evaluation_is_evaluated_alike_on_every_plan(tmp_path: Path) -> None:
    inputs = torch.arange(24.0).view(12, 2) / 12
    words = (*QUIET, "steps=4", "eval_every=2", "batch.effective=6", "batch.micro=2",
             "batch.shard=null", "reduction=exact", "loss=mse",
             "optimizer.lr=0.01", *data_of("twelve", inputs, inputs[:, :1]),
             *model_of("noisy", lambda info: Noisy()))  # fmt: skip
    alone = train(tmp_path / "alone", *words)
    expected = rows(tmp_path / "alone", "eval/loss")
    assert len(set(expected)) == 2
    for record in train_ranks(3, tmp_path / "three", *words):
        assert record.weights == alone.weights, "NumPy and Python are seeded for the shard, too"
    assert rows(tmp_path / "three", "eval/loss") == expected
    train(tmp_path / "again", *words, "task=evaluate", f"resume={tmp_path / 'alone'}")
    assert rows(tmp_path / "again", "eval/loss") == expected[-1:]


def test_generators_that_an_optimizer_keeps_are_seeded_for_the_step() -> None:
    class Own:
        def __init__(self) -> None:
            self.mine, self.torchs, self.lr = random.Random(1), torch.Generator(), 0.1

    drawn = []
    for _ in range(2):
        own, seed = Own(), ShardSeeder(3, [torch.device("cpu")])
        for step in (0, 1):
            seed.update(step, own)
            drawn.append((own.mine.random(), torch.rand(1, generator=own.torchs).item(), torch.rand(1).item(),
                          random.random(), float(numpy.random.rand())))  # fmt: skip
    assert drawn[:2] == drawn[2:] and all(a != b for a, b in zip(drawn[0], drawn[1], strict=True))


def test_numpy_and_python_are_seeded_only_where_anybodys_own_code_runs() -> None:
    class Mine(torch.nn.Linear):
        pass

    def hook(module: object, inputs: object) -> None:
        pass

    plain, loss = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout()), torch.nn.CrossEntropyLoss()
    hooked, patched = torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1)
    hooked[0].register_forward_pre_hook(hook)
    patched.forward = lambda inputs: inputs  # type: ignore[method-assign]
    assert not draws_on_host(code_of(plain, loss))
    for module, criterion, other in ((torch.nn.Sequential(Mine(1, 1)), loss, loss), (hooked, loss, loss), (patched, loss, loss),
                                     (plain, hook, loss), (plain, loss, hook), (plain, partial(loss), loss)):  # fmt: skip
        assert draws_on_host(code_of(module, criterion, other))


def test_a_forward_is_not_seeded_where_none_of_its_layers_can_draw() -> None:
    from torch.nn.utils import parametrizations

    from isobatch.loss.elements import ElementCrossEntropy, FocalLoss

    def hook(*given: object) -> None:
        pass

    class Loud(ElementCrossEntropy):
        pass

    def net(*more: torch.nn.Module) -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 2), torch.nn.ReLU(), *more)

    quiet = ElementCrossEntropy(None, None)
    for criterion in (quiet, FocalLoss(None, None, 2.0), torch.nn.CrossEntropyLoss()):
        assert not draws(code_of(net(torch.nn.BatchNorm1d(2)), criterion))
    loud = [net() for _ in range(6)]
    loud[0][1].register_full_backward_hook(hook)
    loud[1][1].weight.register_hook(hook)
    loud[2][1].weight.register_post_accumulate_grad_hook(hook)
    loud[3].register_forward_hook(hook)
    loud[4].forward = torch.nn.functional.dropout  # type: ignore[method-assign]
    parametrizations.spectral_norm(loud[5][1])
    for module in (*loud, net(torch.nn.Dropout(0.0)), net(torch.nn.RReLU())):
        assert draws(code_of(module, quiet))
    assert draws(code_of(net(), Loud(None, None))) and draws(code_of(net(), torch.nn.functional.mse_loss))
    assert draws(code_of(net(), quiet, hook))
    before = torch.get_rng_state()
    ShardSeeder(1, [torch.device("cpu")], host=False, forward=False)(0, (0,))
    assert torch.equal(torch.get_rng_state(), before)


def test_torchs_and_timms_forwards_draw_from_torch_alone() -> None:
    import timm
    import torch

    draws = re.compile(r"^\s*(?:from random |import random\b|from numpy)|\b(?:np|numpy)\.random\b", re.MULTILINE)
    places = [(torch, "nn/modules"), (torch, "nn/utils"), (timm, "layers"), (timm, "models"), (timm, "loss")]
    for package, folder in places:
        files = list((Path(package.__file__).parent / folder).rglob("*.py"))
        assert files
        assert [f.name for f in files if draws.search(f.read_text())] == []
    assert draws.search("x = np.random.rand()") and draws.search("import random\n") and draws.search("from random import x")


def test_every_step_draws_anew(tmp_path: Path) -> None:
    """On one plan too: equal draws in every step would agree on all plans."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.last = torch.rand(())
            return self.layer(x)

    drawn: list[Tensor] = []
    train(tmp_path, *QUIET, *model_of("drawing", lambda info: Drawing()), *data_of("two", torch.ones(2, 1), torch.ones(2, 1)),
          "loss=mse", "steps=3", "eval_every=9", "batch.effective=2", "batch.micro=2", "batch.shard=null", "checkpoint=none",
          observe=lambda state, *_: drawn.append(state.model.last))  # fmt: skip
    assert len({float(value) for value in drawn}) == 3
