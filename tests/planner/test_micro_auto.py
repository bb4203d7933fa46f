"""`batch.micro=auto`: found by trying, agreed by ranks, kept by a resume, and never at the cost of the effective batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BASE, plain, summary, train, train_ranks

from isobatch import run
from isobatch.errors import ConfigError
from isobatch.model import MLP
from isobatch.planner import estimate
from isobatch.runtime.distributed import Ranks

AUTO = (*BASE, "batch.effective=48", "batch.micro=auto", "batch.shard=null", "epochs=null", "steps=2", "log_every=1")
BUILD = MLP.build


def limit(monkeypatch, *largest: int) -> None:
    """Models that run out of memory above so many samples while they train; one limit a rank, or one for all."""

    def no_more(module, args):
        rank = dist.get_rank() if dist.is_initialized() else 0
        if torch.is_grad_enabled() and len(args[0]) > largest[rank % len(largest)]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (simulated)")

    def build(self, info):
        model = BUILD(self, info)
        model.register_forward_pre_hook(no_more)
        return model

    monkeypatch.setattr(MLP, "build", build)


def plan_of(folder: Path) -> dict:
    return json.loads((folder / "plan.json").read_text())


def test_the_largest_that_fits_trains_what_it_would_train_if_typed(tmp_path: Path, monkeypatch, capsys) -> None:
    """Weights, batch-norm statistics and dropout as without a search: the trials left nothing behind."""
    noisy = ("model.norm=true", "model.drop_rate=0.3", "sampler.tail=drop")
    limit(monkeypatch, 20)
    train(tmp_path / "auto", *AUTO, *noisy)
    plan = plan_of(tmp_path / "auto")
    assert (plan["effective_batch"], plan["micro_batch"], plan["accumulation_steps"]) == (48, 16, 3)
    assert plan["micro_tried"]["48"] is False and plan["micro_tried"]["24"] is False and plan["micro_tried"]["16"] is True
    assert "16 fits on cpu, 48, 24 did not" in capsys.readouterr().out
    train(tmp_path / "typed", *AUTO, *noisy, "batch.micro=16")
    assert summary(tmp_path / "auto")["weights_sha256"] == summary(tmp_path / "typed")["weights_sha256"]


def test_where_all_fits_one_trial_is_enough(tmp_path: Path) -> None:
    train(tmp_path, *AUTO)
    assert plan_of(tmp_path)["micro_batch"] == 48 and plan_of(tmp_path)["micro_tried"] == {"48": True}


def test_ranks_agree_on_the_smallest_answer(tmp_path: Path, monkeypatch) -> None:
    limit(monkeypatch, 30, 10)
    records = train_ranks(2, tmp_path, *AUTO)
    plan = summary(tmp_path)["plan"]
    # 24 and 12 would do for rank 0, rank 1 has room for 8
    assert (plan["effective_batch"], plan["micro_batch"], plan["num_replicas"], plan["accumulation_steps"]) == (48, 8, 2, 3)
    assert records[0].weights == records[1].weights


def test_a_resume_keeps_what_was_found(tmp_path: Path, monkeypatch) -> None:
    limit(monkeypatch, 20)
    train(tmp_path / "a", *AUTO)
    limit(monkeypatch, 1000)
    train(tmp_path / "b", *AUTO, "steps=4", f"resume={tmp_path / 'a'}")
    plan = plan_of(tmp_path / "b")
    assert plan["micro_batch"] == 16 and "micro_tried" not in plan
    assert summary(tmp_path / "b")["plan"]["accumulation_steps"] == 3
    train(tmp_path / "c", *AUTO, "task=evaluate", f"resume={tmp_path / 'a'}")
    assert plan_of(tmp_path / "c")["micro_batch"] == 16


def test_batch_norm_never_gets_a_shard_of_one(tmp_path: Path, monkeypatch) -> None:
    words = (*AUTO, "model.norm=true", "batch.effective=6", "sampler.tail=drop", "task=plan")
    limit(monkeypatch, 2)
    train(tmp_path / "two", *words)
    assert plan_of(tmp_path / "two")["micro_batch"] == 2
    limit(monkeypatch, 1)
    with pytest.raises(ConfigError, match="not even a micro batch of 2 fits") as refusal:
        train(tmp_path / "one", *words)
    assert refusal.value.key == "batch.micro" and "grad_checkpointing" in str(refusal.value)
    train(tmp_path / "none", *words, "model.norm=false")
    assert plan_of(tmp_path / "none")["micro_batch"] == 1


def test_a_given_accumulation_is_kept_or_refused(tmp_path: Path, monkeypatch) -> None:
    limit(monkeypatch, 20)
    train(tmp_path / "a", *AUTO, "accumulation=4")
    assert plan_of(tmp_path / "a")["micro_batch"] == 12
    with pytest.raises(ConfigError, match="leave accumulation=auto"):
        train(tmp_path / "b", *AUTO, "accumulation=2")


def test_on_a_cpu_a_limit_is_assumed_and_said(tmp_path: Path, monkeypatch, capsys) -> None:
    words = (*AUTO, "model.width=512", "model.depth=4", "batch.effective=1024")
    monkeypatch.setattr(estimate, "available_bytes", lambda: 15 * estimate.MB)
    train(tmp_path, *words, "task=plan")
    assert 1 < plan_of(tmp_path)["micro_batch"] < 512
    said = capsys.readouterr().out
    assert "assumed to have 80 %" in said and "12 MB" in said
    monkeypatch.undo()
    assert estimate.available_bytes() > 50 * estimate.MB


def test_another_error_is_not_taken_for_a_lack_of_memory(tmp_path: Path, monkeypatch) -> None:
    def build(self, info):
        model = BUILD(self, info)
        model.register_forward_pre_hook(lambda module, args: (_ for _ in ()).throw(RuntimeError("a bug in the model")))
        return model

    monkeypatch.setattr(MLP, "build", build)
    with pytest.raises(RuntimeError, match="a bug in the model"):
        run.run_job(plain(*AUTO), tmp_path, Ranks())
