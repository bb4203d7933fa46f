"""Buffers that a forward changes: covered by the rule of batch norm, or named after the first window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import train, train_ranks
from precision_probes import QUIET, data_of, model_of
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

INPUTS = torch.randn(18, 2, 3, 3, generator=torch.Generator().manual_seed(0))
WORDS = (*QUIET, "steps=3", "eval_every=100", "batch.effective=6", "batch.micro=2",
         "batch.shard=null", "reduction=exact", "loss=mse",
         "optimizer.lr=0.01", "checkpoint.every=3", "sampler=sequential",
         *data_of("eighteen_pairs", INPUTS, INPUTS.mean((1, 2, 3)).view(-1, 1)))  # fmt: skip


class Cumulative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm2d(2, momentum=None), nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.norm(inputs).mean((2, 3)))  # type: ignore[no-any-return]


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = spectral_norm(nn.Linear(18, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.flatten(1))  # type: ignore[no-any-return]


def test_a_cumulative_average_is_the_same_on_every_plan(tmp_path: Path) -> None:
    words = (*WORDS, *model_of("cumulative", lambda info: Cumulative()))

    def seen(into: list[Any]) -> Any:
        return lambda state, parts, data: into.append(
            [t.tolist() for t in (state.model.norm.running_mean, state.model.norm.num_batches_tracked)]
        )

    alone: list[Any] = []
    train(tmp_path / "alone", *words, observe=seen(alone))
    # by hand: the first window averages its three shards, each as the first batch ever
    means = torch.stack([INPUTS[:6][v::3].mean((0, 2, 3)) for v in range(3)]).mean(0)
    assert alone[0][0] == pytest.approx(means.tolist(), abs=1e-6) and [s[1] for s in alone] == [1, 2, 3]
    from isobatch import checkpoint

    train_ranks(3, tmp_path / "three", *words)
    state = checkpoint.load(tmp_path / "three")["model"]
    assert state["norm.running_mean"].tolist() == alone[-1][0]


def test_buffers_without_a_rule_are_named_before_the_second_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    train(tmp_path / "a", *WORDS, *model_of("spectral", lambda info: Spectral()),
          observe=lambda state, parts, data: told.append(caplog.text))  # fmt: skip
    assert "no rule for (layer.parametrizations.weight.0._u, layer.parametrizations.weight.0._v)" in told[0]
    assert caplog.text.count("no rule for") == 1
    caplog.clear()
    train(tmp_path / "b", *WORDS, *model_of("cumulative", lambda info: Cumulative()))
    assert "no rule for" not in caplog.text
