"""An average that lags behind: both kinds of weights are evaluated, and `best` is the better of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def test_swa_is_the_plain_mean_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    """Of the weights after updates 3, 5, 7; batch norm's statistics with them. Before the first the weights are as they are."""
    words = ("logger=none", "threads=1", "data=synthetic", "data.samples=16", "data.eval_samples=8", "data.image_size=32",
             "data.num_classes=3", "model=timm", "model.arch=test_resnet", "scheduler=constant", "epochs=null", "steps=8",
             "batch.effective=8", "eval_every=8", "optimizer=sgd", "optimizer.lr=0.05", "ema=swa", "ema.start=3",
             "ema.every=1ep")  # fmt: skip
    seen: list[dict[str, torch.Tensor]] = []
    averages: list[dict[str, torch.Tensor]] = []

    def observe(state: Any, parts: Any, data: Any) -> None:
        seen.append({name: t.detach().clone() for name, t in state.model.state_dict().items()})
        averages.append({name: t.clone() for name, t in state.ema.module.state_dict().items()})

    train(tmp_path / "whole", *words, observe=observe)
    for name, average in averages[-1].items():
        if average.is_floating_point():
            mean = torch.stack([seen[i][name] for i in (2, 4, 6)]).mean(0)
            assert torch.allclose(average, mean, rtol=1e-5, atol=1e-7), name
    assert all(torch.equal(averages[1][name], seen[1][name]) for name in seen[1])
    assert averages[3]["fc.weight"].equal(seen[2]["fc.weight"])
    whole = {name: t.clone() for name, t in averages[-1].items()}
    train(tmp_path / "first", *words, "steps=4")
    train(tmp_path / "second", f"resume={tmp_path / 'first'}", "steps=8", observe=observe)
    assert all(torch.equal(averages[-1][name], whole[name]) for name in whole)
