"""Reported faults of gradient accumulation (cases 4 to 8, 11): every sample of a window weighs the same, and only once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from harness import mean_probe, rows, summary, train, train_ranks


def upto(n: int) -> list[float]:
    return [float(i) for i in range(1, n + 1)]


@pytest.mark.parametrize(
    ("n", "micro", "accumulation", "tail", "biases"),
    [
        (10, 4, 2, "keep", [4.5, 9.5]),
        (7, 3, 3, "keep", [4.0]),
        (11, 2, 3, "keep", [3.5, 9.0]),
        (10, 4, 2, "drop", [4.5]),
    ],
)
@pytest.mark.case(5)
def test_a_short_window_weighs_its_true_samples(tmp_path: Path, n, micro, accumulation, tail, biases) -> None:
    record = train(tmp_path, *mean_probe(upto(n)), "batch.effective=null", f"batch.micro={micro}", "batch.shard=null",
                   f"accumulation={accumulation}", f"sampler.tail={tail}")  # fmt: skip
    assert record.last == pytest.approx(biases, abs=1e-5)
    assert summary(tmp_path)["updates"] == len(biases)


@pytest.mark.case(4)
def test_the_left_over_window_is_neither_dropped_nor_carried(tmp_path: Path) -> None:
    record = train(tmp_path, *mean_probe(upto(10)), "epochs=2", "batch.effective=8", "batch.micro=4", "batch.shard=null")
    assert record.last == pytest.approx([4.5, 9.5, 4.5, 9.5], abs=1e-5)
    assert rows(tmp_path, "train/loss")[0] == pytest.approx(sum(t * t for t in range(1, 9)) / 8)


@pytest.mark.case(6)
def test_ranks_meet_once_per_window_in_its_last_micro_step(tmp_path: Path) -> None:
    from isobatch.parallel import DistributedDataParallel

    calls = tmp_path / "calls"

    def counting(self, wrapped, micro):
        context = original(self, wrapped, micro)
        with calls.open("a") as file:
            file.write(f"{micro.is_last} {type(context).__name__}\n")
        return context

    original = DistributedDataParallel.gradient_sync
    DistributedDataParallel.gradient_sync = counting
    try:
        records = train_ranks(2, tmp_path, *mean_probe(upto(8)), "batch.effective=4", "batch.micro=1", "batch.shard=null")
    finally:
        DistributedDataParallel.gradient_sync = original
    for record in records:
        assert record.last == pytest.approx([2.5, 6.5], abs=1e-5)
    assert records[0].weights == records[1].weights
    lines = sorted(calls.read_text().split("\n")[:-1])
    # per rank two windows of two micro steps: one held back, one that meets
    assert lines == ["False _GeneratorContextManager"] * 4 + ["True _GeneratorContextManager"] * 4


@pytest.mark.case(7)
def test_schedule_and_log_count_updates(tmp_path: Path) -> None:
    record = train(tmp_path, *mean_probe(upto(12)), "epochs=2", "batch.effective=null", "batch.micro=2",
                   "batch.shard=null", "accumulation=3",
                   "optimizer.lr=0.1", "scheduler=cosine")  # fmt: skip
    assert record.lrs == pytest.approx([0.1, 0.085355, 0.05, 0.014645], abs=1e-6)
    assert rows(tmp_path, "train/lr") == record.lrs
    limited = train(tmp_path / "limited", *mean_probe(upto(12)), "epochs=null", "steps=3", "batch.effective=6",
                    "batch.micro=2", "batch.shard=null")  # fmt: skip
    assert len(limited.last) == 3


@pytest.mark.parametrize("precision", [(), ("precision=amp", "precision.dtype=float16", "precision.loss_scale=1024")])
@pytest.mark.case(8)
def test_the_whole_window_is_clipped_once(tmp_path: Path, precision: tuple[str, ...], monkeypatch) -> None:
    from isobatch import data
    from isobatch.data import DataInfo, RandomMatrix, Split, Splits

    inputs = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    split = Split(torch.utils.data.TensorDataset(inputs, inputs[:, :1]), (inputs, inputs[:, :1]))
    monkeypatch.setattr(RandomMatrix, "load", lambda self, augment, seed: Splits(split, split, DataInfo("clip", (2,))))
    assert data.TABLE["random_matrix"] is RandomMatrix
    record = train(tmp_path, *mean_probe([1.0])[:-2], "data=random_matrix", "model.bias=false", "loss=output_mean",
                   "optimizer.lr=1", "batch.effective=2", "batch.micro=1",
                   "batch.shard=null", "max_grad_norm=0.5", *precision)  # fmt: skip
    assert record.norms[0] == pytest.approx(math.sqrt(2), abs=2e-3 if precision else 1e-5)
    assert record.weights[0] == pytest.approx([-0.35355, -0.35355], abs=1e-4)
    assert rows(tmp_path, "train/grad_norm")[0] == record.norms[0]


@pytest.mark.case(11)
def test_unequal_ranks_neither_hang_nor_skew_the_mean(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    targets = [1.0, 2.0, 3.0, 4.0, 11.0]
    one = train_ranks(2, tmp_path / "i", *mean_probe(targets), "batch.effective=2", "batch.micro=1", "batch.shard=null")
    assert [r.last for r in one] == [pytest.approx([1.5, 3.5, 11.0], abs=1e-5)] * 2
    dropped = train_ranks(2, tmp_path / "drop", *mean_probe(targets), "batch.effective=2", "batch.micro=1", "batch.shard=null",
                          "sampler.tail=drop")  # fmt: skip
    assert [len(r.last) for r in dropped] == [2, 2]
    two = train_ranks(2, tmp_path / "ii", *mean_probe(targets), "batch.effective=6", "batch.micro=3", "batch.shard=null")
    assert [r.last for r in two] == [pytest.approx([4.2], abs=1e-5)] * 2
    padded = train_ranks(2, tmp_path / "pad", *mean_probe(targets), "batch.effective=6", "batch.micro=3", "batch.shard=null",
                         "sampler.tail=pad")  # fmt: skip
    assert [r.last for r in padded] == [pytest.approx([22 / 6], abs=1e-5)] * 2
    assert "sampler.tail=pad repeats 1 sample(s) in every epoch" in capfd.readouterr().out


@pytest.mark.case(11)
def test_a_rank_without_a_shard_waits_for_nobody(tmp_path: Path) -> None:
    """Five ranks, three shards in a full window and one in the tail: the same biases as on one process."""
    targets = upto(4)
    alone = train(tmp_path / "alone", *mean_probe(targets), "batch.effective=3", "batch.micro=1", "batch.shard=null")
    for record in train_ranks(
        5, tmp_path / "five", *mean_probe(targets), "batch.effective=3", "batch.micro=1", "batch.shard=null"
    ):
        assert record.last == pytest.approx(alone.last, abs=1e-5)
    assert alone.last == pytest.approx([2.0, 4.0], abs=1e-5)
