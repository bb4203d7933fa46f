"""`task=replay`: what a run recorded comes out again, on this plan or another, or the first thing that does not is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import BASE, train, train_ranks

from isobatch.errors import ConfigError, JobFailed

RUN = (*BASE, "epochs=null", "steps=6", "log_every=1", "eval_every=3", "checkpoint.every=2", "checkpoint.keep=9",
       "batch.micro=12", "batch.shard=null", "model.norm=true", "reduction=exact")  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    train(folder, *RUN)
    return folder


def again(folder: Path, run: Path, *words: str) -> dict[str, Any]:
    train(folder, *RUN, "task=replay", f"resume={run}", *words)
    return json.loads((folder / "replay.json").read_text())


def test_it_reproduces_from_the_first_checkpoint_and_leaves_the_run_alone(recorded: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()}
    verdict = again(tmp_path / "again", recorded)
    assert verdict["reproduces"] and verdict["to_the_bit"] and (verdict["from"], verdict["to"]) == (2, 6)
    assert verdict["rows"]["common"] == 6 and verdict["tensors"] == []  # four steps, two evaluations
    assert {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "again" / "checkpoints").exists()


def test_some_steps_from_the_seed_on_two_ranks(recorded: Path, tmp_path: Path) -> None:
    train_ranks(2, tmp_path / "two", *RUN, "task=replay", f"resume={recorded}", "replay.from=0", "replay.steps=2")
    verdict = json.loads((tmp_path / "two" / "replay.json").read_text())
    assert verdict["to_the_bit"] and (verdict["from"], verdict["to"], verdict["tensors"]) == (0, 2, [])
    assert verdict["rows"]["common"] >= 2


def test_a_number_that_was_changed_by_hand_is_found(recorded: Path, tmp_path: Path) -> None:
    import shutil

    forged = tmp_path / "forged"
    shutil.copytree(recorded, forged)
    rows = [json.loads(line) for line in (forged / "metrics.jsonl").read_text().splitlines()]
    row = next(row for row in rows if row["step"] == 5 and "train/loss" in row)
    row["train/loss"] *= 0.9
    (forged / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(JobFailed, match="steps 5 to 6 do not reproduce here: first at step 5, train/loss"):
        again(tmp_path / "again", forged, "replay.from=4")
    verdict = json.loads((tmp_path / "again" / "replay.json").read_text())
    assert not verdict["reproduces"] and verdict["rows"]["first"]["key"] == "train/loss"


def test_under_fast_on_another_plan_rounding_is_allowed_and_said(tmp_path: Path) -> None:
    words = [word for word in RUN if word != "reduction=exact"]
    train(tmp_path / "run", *words)
    train_ranks(2, tmp_path / "two", *words, "task=replay", f"resume={tmp_path / 'run'}", "replay.from=0")
    verdict = json.loads((tmp_path / "two" / "replay.json").read_text())
    assert verdict["reproduces"]
    assert verdict["to_the_bit"] or "up to rounding" in verdict["verdict"]


@pytest.mark.parametrize(
    ("words", "key"),
    [(("replay.from=5",), "replay.from"), (("replay.from=6",), "replay.from"), (("replay.steps=0",), "replay.steps"),
     (("replay.from=0", "optimizer.lr=0.5"), "optimizer.lr"), (("replay.from=2", "optimizer.lr=0.5"), "optimizer.lr")],
)  # fmt: skip
def test_refusals(recorded: Path, tmp_path: Path, words: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        again(tmp_path / "again", recorded, *words)
    assert refusal.value.key == key


def test_a_run_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a run to replay"):
        train(tmp_path, *RUN, "task=replay")
