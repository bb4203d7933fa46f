"""Sweeps: a relaunch does only what is left, and a job in a sweep is the job run alone."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import warm
from harness import BASE, plain, summary, train

from isobatch import sweeps
from isobatch.cli.swept_overrides import reachable
from isobatch.config import to_yaml
from isobatch.errors import ConfigError

TRAIN = Path(__file__).parents[2] / "train.py"
QUICK = ["model=mlp", "model.width=16", "logger=none", "epochs=null", "steps=3", "threads=1"]


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, str(TRAIN), *words], cwd=folder, capture_output=True)


def test_a_relaunched_sweep_skips_what_is_complete_and_ends_in_a_comparison(tmp_path: Path) -> None:
    words = ["-m", "accumulation=1,0,3", *QUICK, "hydra.sweep.dir=sweep"]
    first = launch(tmp_path, *words)
    assert first.returncode == 1  # job 1 was refused
    assert "isobatch: accumulation.steps=0: is not a positive integer; " in first.stderr
    states = [summary(tmp_path / "sweep" / job)["state"] for job in "012"]
    assert states == ["completed", "failed", "completed"]
    assert "accumulation.steps=0" in summary(tmp_path / "sweep" / "1")["error"]
    assert "accumulation.steps=0" in (tmp_path / "sweep" / "1" / "train.log").read_text()
    digests = {summary(tmp_path / "sweep" / job)["plan"]["accumulation_steps"] for job in "02"}
    assert digests == {1, 3}
    for name in ("report.html", "report.csv"):
        assert (tmp_path / "sweep" / name).stat().st_size > 500
    assert list((tmp_path / "sweep" / "report").glob("*.png"))

    (tmp_path / "sweep" / "2" / "summary.json").unlink()  # as if killed at its end
    second = launch(tmp_path, *words)
    assert "job 0 is complete" in second.stderr and "job 0 goes on" not in second.stderr
    assert "job 2 goes on from its last checkpoint" in second.stderr
    assert summary(tmp_path / "sweep" / "2")["state"] == "completed"
    changed = launch(tmp_path, "-m", "accumulation=1", "optimizer.lr=0.5", *QUICK, "hydra.sweep.dir=sweep")
    assert changed.returncode == 1
    assert "optimizer.lr=0.5: " in changed.stderr and "holds a job with optimizer.lr=0.002" in changed.stderr


def test_options_of_a_swept_choice_reach_it() -> None:
    words = ["-m", "parallel=ddp,fsdp", "parallel.nproc=2", "+parallel.bucket_mb=3", "optimizer=sgd", "optimizer.lr=0.1,0.2"]
    assert reachable(words) == ["-m", "parallel=ddp,fsdp", "++parallel.nproc=2", *words[3:]]
    assert reachable(words[1:]) == words[1:]  # no sweep: Hydra looks where it should
    assert reachable(["--multirun", "model=glob(*)", "model.width=3", "model.kwargs.x=1"])[2:] == [
        "++model.width=3",
        "model.kwargs.x=1",
    ]
    assert reachable(["-m", "optimizer=sgd,adamw", "optimizer.lr=1"])[2] == "optimizer.lr=1"  # all of them have it


def test_what_an_earlier_launch_left_decides(tmp_path: Path) -> None:
    config = plain(*BASE)
    assert sweeps.earlier(config, tmp_path) == ("new", None)
    train(tmp_path, *BASE, "epochs=null", "steps=1")
    config = plain(*BASE, "epochs=null", "steps=1")
    word, value = sweeps.earlier(config, tmp_path)
    assert word == "skip" and value == summary(tmp_path)["final"]["eval/accuracy"]
    (tmp_path / "summary.json").write_text(json.dumps({"state": "failed"}))
    assert sweeps.earlier(config, tmp_path)[0] == "go on"
    with pytest.raises(ConfigError, match="seed=7"):
        sweeps.earlier({**config, "seed": 7}, tmp_path)
    with pytest.raises(ConfigError, match=r"optimizer\.kwargs"):
        sweeps.earlier({**config, "optimizer": {**config["optimizer"], "kwargs": {"nesterov": True}}}, tmp_path)


def test_a_sweep_of_an_earlier_release_is_gone_on_with(tmp_path: Path) -> None:
    """Its jobs say nothing of options and groups that came later; what they then did differently is no secret."""
    config = plain(*BASE, "batch.shard=null")
    before = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items() if key != "audit"}
    del before["batch"]["shard"], before["data"]["num_workers"]
    (tmp_path / "config.yaml").write_text(to_yaml(before))
    today = {**config, "batch": {**config["batch"], "shard": 8}}
    (tmp_path / "summary.json").write_text(json.dumps({"state": "failed"}))
    assert sweeps.earlier(config, tmp_path)[0] == "again"
    with pytest.raises(ConfigError, match=r"batch\.shard=8: .* holds a job with batch\.shard=None"):
        sweeps.earlier(today, tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"state": "completed", "final": {"eval/accuracy": 0.5}}))
    assert sweeps.earlier(today, tmp_path) == ("skip", 0.5)


def test_training_has_the_garbage_collector_that_the_start_does_without(tmp_path: Path) -> None:
    gc.disable()
    try:
        train(tmp_path, *BASE, "epochs=null", "steps=1")
        assert gc.isenabled()
    finally:
        gc.enable()


def traces() -> dict[str, object]:
    """What a job could leave behind in the process."""
    return {
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": {t.name for t in threading.enumerate() if t.is_alive() and not t.daemon},
        "handlers": len(logging.getLogger().handlers),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("WANDB", "CUDA", "HYDRA"))},
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad": torch.is_grad_enabled(),
    }


def test_a_job_of_a_sweep_is_the_job_run_alone(tmp_path: Path) -> None:
    """The same job before, between and after others of all kinds: the same bits, and no trace of it."""
    job = (*BASE, "model.drop_rate=0.2", "model.norm=true", "epochs=null", "steps=4", "batch.micro=16", "ema=ema")
    others = [
        ("precision=bf16",), ("deterministic=true", "seed=5"), ("reduction=exact",), ("parallel=dp", "parallel.replicas=3"),
        ("precision=amp", "precision.dtype=float16"),
    ]  # fmt: skip
    before = traces()
    train(tmp_path / "first", *job)
    alone = summary(tmp_path / "first")["weights_sha256"]
    for i, other in enumerate(others):
        train(tmp_path / f"other{i}", *job, *other)
        train(tmp_path / f"again{i}", *job)
        assert summary(tmp_path / f"again{i}")["weights_sha256"] == alone, f"after {other}"
    assert traces() == before
