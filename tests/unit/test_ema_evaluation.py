"""An average that lags behind: both kinds of weights are evaluated, and `best` is the better of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import plain, rows, summary, train
from safetensors.torch import load_file
from torch import nn

from isobatch import checkpoint
from isobatch.checkpoint import Checkpoint
from isobatch.config import options

WORDS = ("logger=none", "threads=1", "model=mlp", "model.width=32", "model.depth=1", "scheduler=constant", "epochs=null",
         "steps=60", "eval_every=30", "batch.effective=32", "optimizer.lr=0.01", "ema=ema")  # fmt: skip


def test_with_its_defaults_an_average_is_of_use_in_a_short_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "isobatch")
    train(tmp_path / "a", *WORDS)
    assert plain(*WORDS)["ema"]["warmup"] is True
    average, raw = (rows(tmp_path / "a", key)[-1] for key in ("eval/accuracy", "eval/raw_accuracy"))
    assert average > 0.85 and raw > 0.85, (average, raw)
    assert "ema.decay=0.999 averages over about 1000 updates, more than the 60 of this run" in caplog.text


def test_best_is_the_better_of_both_and_says_which(tmp_path: Path) -> None:
    """Without warm-up the average is next to the first weights: what was trained is better, and that is what is kept."""
    words = (*WORDS, "ema.warmup=false")
    train(tmp_path / "a", *words)
    average, raw = (rows(tmp_path / "a", key) for key in ("eval/accuracy", "eval/raw_accuracy"))
    assert raw[-1] > average[-1] + 0.2
    assert summary(tmp_path / "a")["best"]["eval/raw_accuracy"] == max(raw)
    for name in ("best", "last"):
        state = checkpoint.load(tmp_path / "a", name)
        weights = load_file(tmp_path / "a" / "checkpoints" / name / "model.safetensors")
        assert state["counters"]["better"] == "raw"
        assert all(torch.equal(weights[key], state["model"][key]) for key in weights)
    found = {}
    for load in ("best", "last"):
        for which in ("auto", "ema", "raw"):
            folder = tmp_path / f"{load}-{which}"
            train(folder, *words, "task=evaluate", f"resume={tmp_path / 'a'}", f"checkpoint.load={load}",
                  f"checkpoint.weights={which}")  # fmt: skip
            (found[load, which],) = rows(folder, "eval/accuracy")
            assert rows(folder, "eval/raw_accuracy") == []
    assert found["best", "auto"] == found["best", "raw"] == max(raw) and found["best", "ema"] < max(raw)
    assert found["last", "auto"] == found["last", "ema"] == average[-1]


def test_which_is_better_is_told_by_the_metric_that_best_follows() -> None:
    result = {"eval/loss": 1.0, "eval/raw_loss": 2.0, "eval/accuracy": 0.5, "eval/raw_accuracy": 0.6}
    assert Checkpoint().better({}, result) == "raw" and Checkpoint(best="eval/loss").better({}, result) == "ema"
    assert Checkpoint(best=None).better({}, result) is None
    before = {"eval/accuracy": {"value": 0.6, "step": 1}}
    assert Checkpoint().better(before, result) is None, "better than the average ever was, and no better than either"
    assert Checkpoint().better(before, {**result, "eval/raw_accuracy": 0.61}) == "raw"
    assert Checkpoint().better({}, {**result, "eval/raw_loss": float("nan")}) == "ema"
    assert Checkpoint().better({}, {"eval/loss": 1.0, "eval/accuracy": 0.5}) == "ema"
    assert Checkpoint().better({}, {**result, "eval/raw_accuracy": 0.5}) == "ema"


def test_a_decay_that_fits_the_run_is_not_spoken_of() -> None:
    ema = options("ema", {"name": "ema", "decay": 0.99})
    assert ema.note(100) is None and "about 100 updates, more than the 99" in ema.note(99)
    assert "all updates" in options("ema", {"name": "ema", "decay": 1.0}).note(5)
    assert options("ema", {"name": "none"}).note(1) is None


def test_a_buffer_that_comes_with_the_first_forward_is_averaged_along() -> None:
    from isobatch.ema.average import Average

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "seen"):
                self.register_buffer("seen", torch.zeros(2))
            self.seen += x.mean(0)
            return self.body(x)

    model = nn.Sequential(Late())
    kept = Average(model, decay=0.5, exclude_buffers=True)
    for step in (2, 3):
        model(torch.ones(3, 2))
        kept.update(model, step=step)
    assert torch.equal(kept.module.state_dict()["0.seen"], torch.full((2,), 2.0))
