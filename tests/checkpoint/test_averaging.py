"""`checkpoint.load=mean`: the mean of a run's numbered checkpoints, for all that takes weights alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from harness import BASE, train

import isobatch
from isobatch import checkpoint
from isobatch.checkpoint import averaging
from isobatch.checkpoint.folder import Damaged
from isobatch.errors import ConfigError

WORDS = (*BASE, "model.norm=true", "epochs=null", "steps=6", "eval_every=6", "batch.effective=8", "optimizer.lr=0.01",
         "checkpoint.every=2", "checkpoint.keep=3", "ema=ema")  # fmt: skip


def test_the_mean_of_a_runs_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    train(run, *WORDS)
    states = [checkpoint.load(run, f"step-{step}") for step in (6, 4, 2)]
    mean = checkpoint.read(run, "mean")
    assert mean.step == 6 and mean.path.name == "mean" and mean.run == run
    for part in ("model", "ema"):
        for name, tensor in mean.state[part].items():
            parts = [state[part][name] for state in states]
            expected = torch.stack(parts).double().mean(0).to(tensor.dtype) if tensor.is_floating_point() else parts[0]
            assert torch.equal(tensor, expected), name
    model = isobatch.load(run, "mean", "raw")
    for name, tensor in model.network.state_dict().items():
        assert torch.equal(tensor, mean.state["model"][name]), name
    train(tmp_path / "evaluated", "task=evaluate", f"resume={run}", "checkpoint.load=mean", "logger=none")
    told = json.loads((tmp_path / "evaluated/evaluation.json").read_text())
    assert told["checkpoint"].endswith("checkpoints/mean") and told["step"] == 6
    with pytest.raises(ConfigError, match=r"^checkpoint\.load=mean: is of weights alone"):
        train(tmp_path / "on", *WORDS, f"resume={run}", "steps=8", "checkpoint.load=mean")
    for name in ("step-2", "step-4"):
        shutil.rmtree(run / "checkpoints" / name)
    with pytest.raises(ConfigError, match=r"^checkpoint\.load=mean: .*one numbered checkpoint, step-6"):
        isobatch.load(run, "mean")


def test_weights_that_do_not_fit_have_no_mean() -> None:
    one, other = ({"model": {"a": torch.ones(n)}, "ema": None} for n in (2, 3))
    assert averaging.mean(iter([one, {"model": {"a": torch.zeros(2)}, "ema": None}]))[0]["model"]["a"].tolist() == [0.5, 0.5]
    with pytest.raises(Damaged, match="other weights"):
        averaging.mean(iter([one, other]))
