"""A model that keeps state of its own, mixes types, has sparse gradients or old weight norm: trained as any, or one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train
from precision_probes import PLAIN_SGD, QUIET, data_of, model_of
from torch import Tensor, nn

from isobatch.errors import ConfigError

IMAGES, LABELS = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
WORDS = (*QUIET, "steps=2", "eval_every=2", "batch.effective=4")


def run(folder: Path, build: Callable[[], nn.Module], *words: str, resumed: bool = False) -> list[list[float]]:
    """The weights after each step of a run (and of a run that goes on from it for one more)."""
    common = (*WORDS, *data_of("eight", IMAGES, LABELS, 4), *model_of("habit", lambda info: build()), *words)
    weights = train(folder / "a", *common).weights
    return weights + train(folder / "b", *common, f"resume={folder / 'a'}", "steps=3").weights if resumed else weights


class Counting(nn.Module):
    def __init__(self, state: Any):
        super().__init__()
        self.layer, self.state = nn.Linear(64, 4), state

    def forward(self, inputs: Tensor) -> Tensor:
        self.state = self.state + 1 if isinstance(self.state, Tensor) else self.state
        return self.layer(inputs.flatten(1))

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_state_of_its_own_is_a_tensor_or_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.name=habit: its part 0 keeps a dict with its weights \(get_extra_state\)"):
        run(tmp_path / "dict", lambda: nn.Sequential(Counting({"n": 0})))
    assert not list(tmp_path.rglob("metrics.jsonl"))
    run(tmp_path / "tensor", lambda: Counting(torch.zeros(1)), "ema=ema", resumed=True)
    saved = [
        torch.load(tmp_path / "tensor" / name / "checkpoints" / "last" / "state.pt")["model"]["_extra_state"] for name in "ab"
    ]
    assert 0 < saved[0] < saved[1], "it goes on where it was"


class Mixed(nn.Module):
    """float64, then bfloat16. follows: it looks up the type of its weights."""

    def __init__(self, follows: bool):
        super().__init__()
        self.first, self.second, self.follows = nn.Linear(64, 8).double(), nn.Linear(8, 4).bfloat16(), follows

    def forward(self, inputs: Tensor) -> Tensor:
        types = (self.first.weight.dtype, self.second.weight.dtype) if self.follows else (torch.float64, torch.bfloat16)
        return self.second(self.first(inputs.flatten(1).to(types[0])).to(types[1])).float()


@pytest.mark.parametrize("words", [("max_grad_norm=0.01",), ("reduction=exact", "optimizer=sgd")])
def test_float64_and_bfloat16_side_by_side(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert len(run(tmp_path, lambda: Mixed(False), *words, resumed=True)) == 3


def test_an_average_in_float32_is_tried_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^ema\.name=ema: keeps the average of half weights in float32, in which the model"):
        run(tmp_path / "a", lambda: Mixed(False), "ema=ema")
    assert not list(tmp_path.rglob("metrics.jsonl"))
    assert len(run(tmp_path / "b", lambda: Mixed(True), "ema=ema")) == 2


class Words(nn.Module):
    def __init__(self, sparse: bool):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8, sparse=sparse), nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.table((3 * inputs.flatten(1).abs()).long().clamp(max=9)).mean(1))


@pytest.mark.parametrize("words", [PLAIN_SGD, ("max_grad_norm=0.1", "ema=ema")])
def test_sparse_gradients_are_dense_ones(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert run(tmp_path / "sparse", lambda: Words(True), *words) == run(tmp_path / "dense", lambda: Words(False), *words)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("words", [("ema=ema",), ("ema=swa", "ema.start=1", "ema.every=1"), ("precision=bf16_pure",)])
def test_the_old_weight_norm_is_copied(tmp_path: Path, words: tuple[str, ...]) -> None:
    def old() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(64, 4)))

    def new() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(64, 4)))

    assert run(tmp_path / "old", old, *words) == run(tmp_path / "new", new, *words)
