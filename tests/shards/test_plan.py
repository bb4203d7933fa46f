"""The shard is stated, the micro batch is free: what is typed, what follows, what is refused, what a resume may change."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from checkpoint_tools import rewrite, same, state_of, train_and_stop, training
from harness import BASE, plain, summary, train

from isobatch.config import load
from isobatch.config.plain import refuse_slip
from isobatch.errors import ConfigError

# everything that a shard decides: batch norm, dropout; 12 samples in three shards, an epoch with a tail of six
RICH = (
    *BASE, "epochs=null", "steps=8", "eval_every=4", "log_every=1", "data=synthetic", "data.samples=42", "data.eval_samples=8",
    "data.image_size=4", "batch.effective=12", "batch.shard=4", "model.norm=true", "model.drop_rate=0.2", "ema=ema",
    "ema.decay=0.9", "optimizer=adamw",
)  # fmt: skip


def plan_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "plan.json").read_text())


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_micro_batch_typed_alone_is_a_multiple_of_the_shard_or_refused() -> None:
    for micro, shard, typed in ((20, 8, {"batch.micro", "batch.shard"}), (24, 8, {"batch.micro"}), (20, 8, {"seed"}),
                                (20, None, {"batch.micro"}), ("auto", 8, {"batch.micro"}),
                                (4, 8, {"batch.micro"})):  # fmt: skip
        refuse_slip(typed, {"micro": micro, "shard": shard})
    refuse_slip({"batch.micro"}, None)
    with pytest.raises(ConfigError, match=r"batch\.micro=16 or 24 \(the same training\), or batch\.shard=null") as refusal:
        refuse_slip({"batch.micro"}, {"micro": 20, "shard": 8})
    assert refusal.value.key == "batch.micro"
    with pytest.raises(ConfigError, match=r"batch\.micro=4: has no room for a shard of batch\.shard=8"):
        load(plain("batch.micro=4", "batch.shard=8"))


def test_what_the_plan_says_of_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    look = (*RICH, "task=plan", "batch.effective=32")
    train(tmp_path / "a", *look, "batch.shard=8", "batch.micro=20")
    text = said(capsys)
    assert "effective 32 = 4 shards of 8; 1 replica x 2 micro steps of 2 shards" in text
    assert "batch.micro=20 has room for 2 shards of 8 samples: rounded down to 16" in text
    assert "batch.shard=8 is part of the contract for this model" in text
    assert "the statistics of 8 samples are noisy: batch.shard=32 is usual for batch norm" in text
    assert {"shard": 8, "micro_batch": 16, "num_shards": 4, "accumulation_steps": 2}.items() <= plan_of(tmp_path / "a").items()
    train(tmp_path / "b", *look, "batch.shard=16", "parallel=dp", "parallel.replicas=4", "accumulation=5")
    text = said(capsys)
    assert "noisy" not in text and "2 of 4 replicas have no shard and wait: batch.shard=8 would use them all" in text
    assert "accumulation=5: 1 micro step of 1 shard hold" in text
    train(tmp_path / "c", *look, "batch.shard=8", "model.norm=false")
    assert "noisy" not in said(capsys)


def test_the_summary_has_the_shard(tmp_path: Path) -> None:
    train(tmp_path, *RICH, "steps=1", "batch.micro=8")
    found = summary(tmp_path)["plan"]
    assert (found["shard"], found["micro_batch"], found["num_shards"], found["accumulation_steps"]) == (4, 8, 3, 2)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_resume_may_change_the_micro_batch_but_not_the_shard(tmp_path: Path, caplog, reduction: str) -> None:
    setting = (*RICH, f"reduction={reduction}")
    train(tmp_path / "whole", *setting)
    train_and_stop(tmp_path / "run", 3, *setting, "batch.micro=4")
    with caplog.at_level(logging.INFO, "isobatch"):
        train(tmp_path / "rest", *setting, "batch.micro=12", f"resume={tmp_path / 'run'}")
    assert ("another micro batch: the rest is equal up to rounding" in caplog.text) == (reduction == "fast")
    assert "the promise drops" not in caplog.text
    found, expected = training(state_of(tmp_path / "rest")), training(state_of(tmp_path / "whole"))
    if reduction == "exact":
        assert same(found, expected)
    losses = [json.loads(line)["train/loss"] for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
              if "train/loss" in line]  # fmt: skip
    rest = [json.loads(line)["train/loss"] for line in (tmp_path / "rest" / "metrics.jsonl").read_text().splitlines()
            if "train/loss" in line]  # fmt: skip
    assert rest == pytest.approx(losses[3:], rel=1e-4)
    for words in (("batch.shard=6",), ("batch.shard=null", "batch.micro=6")):
        with pytest.raises(ConfigError, match=r"was trained with batch\.shard=4"):
            train(tmp_path / "other", *setting, *words, f"resume={tmp_path / 'run'}")


def test_what_was_held_at_once_stays_unless_it_is_typed(tmp_path: Path) -> None:
    train_and_stop(tmp_path / "run", 1, *RICH, "accumulation=3")
    train(tmp_path / "rest", *RICH, "accumulation=3", "parallel=dp", "parallel.replicas=2", f"resume={tmp_path / 'run'}")
    found = plan_of(tmp_path / "rest")
    assert (found["micro_batch"], found["accumulation_steps"], found["num_shards"]) == (4, 2, 3)
    train(tmp_path / "anew", *RICH, "accumulation=1", f"resume={tmp_path / 'run'}")
    assert plan_of(tmp_path / "anew")["micro_batch"] == 12


def test_a_run_from_before_shards_were_stated_goes_on_with_its_micro_batch(tmp_path: Path, caplog) -> None:
    """Its cut is what the micro batch was; that as many shards at once are free now is new."""
    old = (*RICH, "batch.shard=null", "batch.micro=4")
    train(tmp_path / "whole", *old)
    train_and_stop(tmp_path / "run", 3, *old)

    def age(state: dict[str, Any]) -> None:
        del state["plan"]["shard"], state["config"]["batch"]["shard"], state["identity"]["shard"]

    rewrite(tmp_path / "run/checkpoints/last", age)
    unstated = tuple(word for word in RICH if not word.startswith("batch.shard"))  # as the default leaves it
    train(tmp_path / "rest", *unstated, f"resume={tmp_path / 'run'}")
    assert (plan_of(tmp_path / "rest")["shard"], plan_of(tmp_path / "rest")["micro_batch"]) == (4, 4)
    assert same(training(state_of(tmp_path / "rest")), training(state_of(tmp_path / "whole")))
    train(tmp_path / "more", *unstated, "batch.micro=12", f"resume={tmp_path / 'run'}")
    assert (plan_of(tmp_path / "more")["shard"], plan_of(tmp_path / "more")["micro_batch"]) == (4, 12)
    with pytest.raises(ConfigError, match=r"batch\.micro=6: .* was trained with batch\.micro=4"):
        train(tmp_path / "other", *unstated, "batch.shard=null", "batch.micro=6", f"resume={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=r"batch\.shard=6: .* was trained with batch\.shard=4"):
        train(tmp_path / "stated", *unstated, "batch.shard=6", f"resume={tmp_path / 'run'}")
