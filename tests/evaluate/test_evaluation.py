"""Reported faults of evaluation (cases 9, 31, 32): every sample once, sums instead of means of means, no waiting."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from harness import BASE, on_ranks, rows, summary, train, train_ranks
from torch import nn

from isobatch.data import Split
from isobatch.data.device import ToDevice
from isobatch.data.feed import TensorSource
from isobatch.evaluate.evaluator import Evaluator
from isobatch.precision import Full
from isobatch.runtime.distributed import Ranks


def evaluate(right: list[bool], batch_size: int, ranks: Ranks) -> dict[str, float]:
    """Evaluate a model that is right on the given samples: its inputs are the logits of two classes."""
    targets = torch.zeros(len(right), dtype=torch.int64)
    logits = torch.tensor([[2.0, 1.0] if r else [1.0, 2.0] for r in right])
    split = Split(torch.utils.data.TensorDataset(logits, targets), (logits, targets))
    device = torch.device("cpu")
    source = TensorSource((logits, targets), ToDevice(device, None, False))
    evaluator = Evaluator(split, source, nn.CrossEntropyLoss(), Full(), ranks, device, batch_size, 2)
    return evaluator(nn.Identity())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.case(9)
def test_no_sample_counts_twice_at_any_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    right = [False, False, *[True] * 8]
    alone = evaluate(right, 2, Ranks())
    for result in on_ranks(world_size, tmp_path, lambda ranks: evaluate(right, 2, ranks)):
        assert result["eval/accuracy"] == 0.8
        assert result["eval/samples"] == 10
        assert result == alone  # the loss too, to the bit


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.case(31)
def test_the_score_does_not_depend_on_the_batch_size(tmp_path: Path, batch_size: int) -> None:
    right = [True] * 4 + [False]
    for result in [evaluate(right, batch_size, Ranks()), *on_ranks(2, tmp_path, lambda r: evaluate(right, batch_size, r))]:
        assert result["eval/accuracy"] == 0.8
        assert result["eval/loss"] == pytest.approx((4 * 0.3132617 + 1.3132617) / 5, abs=1e-6)
        assert "eval/accuracy_top5" not in result  # of two classes


@pytest.mark.case(31)
def test_top_5_counts_the_first_five_of_more_classes() -> None:
    logits = torch.arange(6.0).repeat(3, 1)  # class 5 first, class 0 last
    targets = torch.tensor([5, 1, 0])
    split = Split(torch.utils.data.TensorDataset(logits, targets), (logits, targets))
    device = torch.device("cpu")
    source = TensorSource((logits, targets), ToDevice(device, None, False))
    result = Evaluator(split, source, nn.CrossEntropyLoss(), Full(), Ranks(), device, 2, 6)(nn.Identity())
    assert (result["eval/accuracy"], result["eval/accuracy_top5"]) == (1 / 3, 2 / 3)


@pytest.mark.case(31)
def test_the_training_loss_is_a_mean_over_samples(tmp_path: Path) -> None:
    """The same first loss for every cut of an uneven window."""
    losses = []
    for micro in (7, 3, 1):
        train(
            tmp_path / str(micro),
            *BASE,
            "batch.effective=7",
            f"batch.micro={micro}",
            "batch.shard=null",
            "epochs=null",
            "steps=1",
        )
        losses += rows(tmp_path / str(micro), "train/loss")[:1]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


@pytest.mark.slow
@pytest.mark.case(32)
def test_evaluation_and_saving_may_take_longer_than_a_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, a model with batch norm, a limit of 6 s; evaluating and saving take 7 s each."""
    slots = Evaluator._slots

    def slow(self, model, step):
        time.sleep(7)  # on every rank: the work is shared, so nobody waits alone
        return slots(self, model, step)

    import safetensors.torch

    save = safetensors.torch.save

    def slow_save(*args, **kwargs):
        time.sleep(7)
        return save(*args, **kwargs)

    monkeypatch.setattr(Evaluator, "_slots", slow)
    monkeypatch.setattr(safetensors.torch, "save", slow_save)
    save_file = safetensors.torch.save_file
    monkeypatch.setattr(safetensors.torch, "save_file", lambda *a, **k: (time.sleep(7), save_file(*a, **k)))
    records = train_ranks(2, tmp_path, *BASE, "model.norm=true", "epochs=null", "steps=4", "eval_every=2",
                          "batch.effective=16", timeout_s=6)  # fmt: skip
    assert records[0].result == records[1].result is not None
    assert summary(tmp_path)["state"] == "completed"
    assert (tmp_path / "checkpoints" / "last").is_dir()
