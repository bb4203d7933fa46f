"""What the plan says before training, beyond its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import BASE, plain, train

from isobatch.config import load
from isobatch.data import DataInfo
from isobatch.errors import ConfigError
from isobatch.runtime.distributed import Ranks


def test_gpus_that_are_not_there_and_replicas_without_work_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = (*BASE, "data=synthetic", "data.samples=8", "data.eval_samples=2", "data.image_size=4", "steps=1",
             "epochs=null")  # fmt: skip
    train(tmp_path / "a", *small, "parallel=dp", "parallel.devices=[0,1]")
    assert "parallel.devices=[0, 1] names GPUs and this machine has none" in capsys.readouterr().out.replace("\n    ", " ")
    words = ("parallel=dp", "parallel.replicas=3", "batch.effective=2", "batch.micro=1", "batch.shard=null")
    train(tmp_path / "b", *small, *words)
    assert "1 of 3 replicas has no shard and waits: use fewer" in capsys.readouterr().out.replace("\n    ", " ")


def test_another_architecture_on_the_default_model_is_told_the_way_out() -> None:
    model = load(plain("model=small", "model.arch=resnet18")).model
    with pytest.raises(ConfigError, match=r"set model=timm model\.arch=resnet18 \(model\.kwargs is \{'patch_size': 1\}\)"):
        model.build(DataInfo("x", (3, 8, 8), 10))


def test_an_exact_run_on_one_core_is_told_that_more_give_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobatch.runtime.cores.usable", lambda: 4)
    words = (*BASE, "reduction=exact", "batch.micro=8", "steps=1", "epochs=null")

    def said(name: str, *more: str) -> str:
        train(tmp_path / name, *words, *more)
        return " ".join(capsys.readouterr().out.split())

    note = "reduction=exact keeps one core busy; parallel=ddp parallel.nproc=4 gives the same bits sooner"
    assert note in said("many") and "keeps one core busy" not in said("one", "batch.effective=8")
    assert "keeps one core busy" not in said("fast", "reduction=fast")


def test_more_work_than_cores_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobatch.planner.notes import crowded

    def said(words: str, ranks: int = 1, share: float | None = None, kind: str = "cpu") -> str:
        monkeypatch.setattr("isobatch.runtime.cores.usable", lambda: 4)
        monkeypatch.setattr("isobatch.runtime.cores.waited", lambda: share)
        return "\n".join(crowded(load(plain(*BASE, words)), Ranks(0, ranks, 0, ranks), torch.device(kind)))

    assert said("threads=4") == said("threads=null", 8) == said("threads=2", 2, 0.1) == said("threads=8", kind="cuda") == ""
    assert said("threads=8").startswith("threads=8 are more than the 4 core(s) of this process: ")
    assert said("threads=3", 2).startswith("threads=3 on each of 2 ranks are more than the 4 core(s)")
    assert said("threads=1", 1, 0.874).startswith("the cores are busy: this process has waited for one 87 % of its time so far")


def test_what_is_set_and_says_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("lr_range.steps=50", "predict.top=3", "replay.from=2", "checkpoint.weights=raw", "model.batch_norm=frozen")
    train(tmp_path, *BASE, "steps=1", "epochs=null", *words)
    said = capsys.readouterr().out.replace("\n    ", " ")
    for key, way in (("lr_range.steps", "lr_range"), ("predict.top", "predict"), ("replay.from", "replay")):
        assert f"{key} says nothing to task=train: it is of task={way}" in said
    assert "checkpoint.weights=raw says nothing to task=train" in said
    assert "model.batch_norm=frozen says nothing: the model has no running statistics" in said
