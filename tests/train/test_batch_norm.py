"""Reported faults of batch norm and of the average (cases 20 to 22): one view of the statistics, on every rank and in EMA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import state_of, train_and_stop
from harness import mean_probe, on_ranks, train
from precision_probes import PLAIN_SGD, QUIET, data_of, model_of
from torch import Tensor, nn

from isobatch.runtime.distributed import Ranks


class Norm(nn.Module):
    """Batch norm with momentum 0.1 alone: (N, 1) -> (N, 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, momentum=0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.norm(inputs)


def norm_probe(name: str, means: list[float], *words: str) -> tuple[str, ...]:
    """One window of shards of two samples, the i-th with mean `means[i]` and the two values 1 apart from it."""
    inputs = torch.tensor([[mean + side] for mean in means for side in (-1.0, 1.0)])
    data = data_of(name, inputs, torch.zeros_like(inputs))
    return (*QUIET, *model_of("norm_alone", lambda info: Norm()), *data, *PLAIN_SGD, "optimizer.lr=0.01", "loss=mse",
            "steps=1", "eval_every=1", f"batch.effective={len(inputs)}", *words)  # fmt: skip


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.case(20)
def test_case_20_all_ranks_and_the_checkpoint_hold_the_mean_of_the_ranks_statistics(tmp_path: Path, strategy: str) -> None:
    def work(ranks: Ranks) -> list[float]:
        seen: list[float] = []
        words = norm_probe("apart", [0.0, 10.0], "batch.micro=2", "batch.shard=null", f"parallel={strategy}")
        train(tmp_path / "run", *words, ranks=ranks,
              observe=lambda state, parts, window: seen.append(state.model.norm.running_mean.item()))  # fmt: skip
        return seen

    assert on_ranks(2, tmp_path, work) == [[0.5]] * 2, "0.1 x (0 + 10) / 2 on every rank, whichever saves and evaluates"
    assert state_of(tmp_path / "run")["model"]["norm.running_mean"].item() == 0.5


@pytest.mark.case(21)
def test_case_21_the_average_counts_updates_not_micro_steps(tmp_path: Path) -> None:
    seen: list[float] = []
    words = (*mean_probe([float(i) for i in range(1, 17)]), "batch.effective=8", "batch.micro=4",
             "batch.shard=null", "ema=ema", "ema.warmup=false", "ema.decay=0.9")  # fmt: skip
    train(tmp_path, *words, observe=lambda state, parts, window: seen.append(state.ema.module[1].bias.item()))
    assert seen == pytest.approx([0.45, 1.655], abs=1e-6)


@pytest.mark.parametrize("strategy", ["single", pytest.param("fsdp", marks=pytest.mark.slow)])
@pytest.mark.case(21)
def test_case_21_the_average_has_the_models_statistics_and_comes_back(tmp_path: Path, strategy: str) -> None:
    words = (*norm_probe("ten", [10.0] * 4, "batch.micro=2", "batch.shard=null", "ema=ema"), "batch.effective=4", "steps=2",
             f"parallel={strategy}")  # fmt: skip

    def work(ranks: Ranks) -> Any:
        train_and_stop(tmp_path / "run", 1, *words, ranks=ranks)
        ranks.agree(0)
        saved = state_of(tmp_path / "run")["ema"]
        assert saved["norm.running_mean"].item() == pytest.approx(1.0)
        assert saved["norm.num_batches_tracked"].item() == 1 and not saved["norm.num_batches_tracked"].is_floating_point()
        found: list[float] = []
        train(tmp_path / "rest", *words, f"resume={tmp_path / 'run'}", ranks=ranks,
              observe=lambda state, parts, window: found.append(state.ema.module.norm.running_mean.item()))  # fmt: skip
        assert found == pytest.approx([1.9]), "0.9 x 1 + 0.1 x 10"
        return int(state_of(tmp_path / "run")["ema"]["norm.num_batches_tracked"])

    assert (on_ranks(2, tmp_path, work) if strategy == "fsdp" else [work(Ranks())]) in ([1], [1, 1])


@pytest.mark.case(22)
def test_case_22_an_accumulated_window_moves_the_statistics_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for name, micro in (("whole", 8), ("accumulated", 2)):
        train(tmp_path / name, *norm_probe("ones", [1.0] * 4, f"batch.micro={micro}", "batch.shard=null"))
        state = state_of(tmp_path / name)["model"]
        found[name] = state["norm.running_mean"].item(), state["norm.num_batches_tracked"].item()
        told = "normalises over a shard of 2 samples" in " ".join(capsys.readouterr().out.split())
        assert told == (name == "accumulated"), "one notice at the start, where it matters"
    assert found["whole"] == found["accumulated"] == (pytest.approx(0.1), 1), "0.3439 after 4 would be one move a micro step"
