"""Group `stop`: early, at a threshold, out of time; each with a word of its own, a checkpoint, and a way to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import BASE, plain, rows, summary, train, train_ranks

from isobatch.checkpoint import load
from isobatch.config import options
from isobatch.errors import ConfigError
from isobatch.stop import Stopping, seconds
from isobatch.sweeps import earlier

# by its own rate a model of this kind gets no better than at the first evaluation
FLAT = (*BASE, "epochs=null", "steps=20", "batch.effective=48", "batch.micro=24", "batch.shard=null", "reduction=exact",
        "log_every=1", "eval_every=2", "optimizer=sgd", "optimizer.lr=0.0")  # fmt: skip
EARLY = (*FLAT, "stop=early", "stop.patience=2")


def rule(**node: Any) -> Stopping:
    return options("stop", {"name": "rules", **node}).build()


def endings(stopping: Stopping, metric: str, values: list[float]) -> list[str | None]:
    found = []
    for value in values:
        stopping.saw({"eval/loss": 0.0, metric: value})
        found.append(stopping.ending and stopping.ending.word)
    return found


def test_why_it_ended_says_by_how_much_more_it_should_have_been_better() -> None:
    stopping = rule(patience=1, min_delta=0.5)
    for loss in (2.0, 1.9):
        stopping.saw({"eval/loss": loss})
    assert stopping.ending is not None
    assert (
        stopping.ending.reason == "eval/loss was not better by more than 0.5 (stop.min_delta) in 1 evaluation (stop.patience)"
    )


def test_patience_threshold_and_direction() -> None:
    nan, early, reached = float("nan"), "early_stopped", "threshold_reached"
    assert endings(rule(patience=2), "eval/loss", [3, 2, 2, 1, 1, nan]) == [None] * 5 + [early]
    assert endings(rule(patience=2, min_delta=0.5), "eval/loss", [3, 2.6, 2.4, 2.2, 2.1]) == [None] * 4 + [early]
    assert endings(rule(patience=1, metric="eval/accuracy"), "eval/accuracy", [0.1, 0.2, 0.2]) == [None, None, early]
    assert endings(rule(threshold=0.9, metric="eval/accuracy"), "eval/accuracy", [0.1, 0.9]) == [None, reached]
    assert endings(rule(threshold=0.5), "eval/loss", [0.6, nan, 0.4]) == [None, None, reached]
    assert endings(rule(patience=1, metric="mine", mode="max"), "mine", [1, 0]) == [None, early]


def test_a_time_has_a_unit() -> None:
    assert [seconds(text) for text in ("45s", "90m", "1.5h", "2d", "01:30", "01:00:00", "1:00:00:01")] == [
        45, 5400, 5400, 172800, 90, 3600, 86401]  # fmt: skip
    for bad in ("12", "0m", "h", "1:2:3:4:5", "", "-3h", "1e3h"):
        with pytest.raises(ConfigError, match=r"stop\.max_time="):
            rule(max_time=bad)


def test_what_ends_nothing_or_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stop\.name=rules: has no rule"):
        rule()
    with pytest.raises(ConfigError, match=r"stop\.mode=auto: whether more or less mine is better is not known"):
        rule(metric="mine", patience=2)
    with pytest.raises(ConfigError, match=r"stop\.metric=eval/raw_loss: an evaluation here has no such metric"):
        train(tmp_path, *EARLY, "stop.metric=eval/raw_loss")


def test_an_early_stop_is_the_same_on_two_ranks_and_can_be_loosened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "one", *EARLY)
    train_ranks(2, tmp_path / "two", *EARLY)
    for folder in (tmp_path / "one", tmp_path / "two"):
        found = summary(folder)
        assert (found["state"], found["steps"], found["error"]) == ("early_stopped", 6, None)
        assert "eval/loss was not better in 2 evaluations" in found["reason"] and found["final"]["eval/loss"]
        assert load(folder)["counters"]["step"] == 6
        assert load(folder)["counters"]["followers"]["stop"]["not_better"] == 2
    assert len(summary(tmp_path / "two")["ranks"]) == 2
    # again, in its own folder or in another one: nothing to do, and it says the same
    before = (tmp_path / "one/summary.json").read_text()
    for word in (f"resume={tmp_path / 'one'}",):
        train(tmp_path / "one", word)
        train(tmp_path / "other", word)
    assert (tmp_path / "one/summary.json").read_text() == before and rows(tmp_path / "one", "train/loss")[-1]
    again = summary(tmp_path / "other")
    assert (again["state"], again["steps"]) == ("early_stopped", 6) and again["final"]["eval/loss"]
    train(tmp_path / "loose", f"resume={tmp_path / 'one'}", "stop.patience=4")
    assert (summary(tmp_path / "loose")["state"], summary(tmp_path / "loose")["steps"]) == ("early_stopped", 10)
    train(tmp_path / "end", f"resume={tmp_path / 'one'}", "stop=none", "steps=8")
    assert (summary(tmp_path / "end")["state"], summary(tmp_path / "end")["steps"]) == ("completed", 8)


def test_a_sweep_skips_what_has_ended_and_goes_on_with_what_ran_out_of_time(tmp_path: Path) -> None:
    words = (*FLAT, "stop=threshold", "stop.metric=eval/loss", "stop.threshold=9")
    train(tmp_path / "reached", *words)
    assert summary(tmp_path / "reached")["state"] == "threshold_reached" and summary(tmp_path / "reached")["steps"] == 2
    assert earlier(plain(*words), tmp_path / "reached")[0] == "skip"


@pytest.mark.parametrize("world_size", [1, 2])
def test_time_is_up_for_all_ranks_at_one_step(world_size: int, tmp_path: Path) -> None:
    words = (*FLAT, "stop=time", "stop.max_time=0.000001s", "eval_every=20", "stop.patience=1")
    records = [train(tmp_path, *words)] if world_size == 1 else train_ranks(2, tmp_path, *words)
    found = summary(tmp_path)
    assert found["state"] == "out_of_time" and found["reason"] == "stop.max_time=0.000001s is up" and found["error"] is None
    assert 0 < found["steps"] < 20 and load(tmp_path)["counters"]["step"] == found["steps"]
    assert {len(record.weights) for record in records} == {found["steps"]}
    if world_size == 1:
        assert earlier(plain(*words), tmp_path)[0] == "go on"
        train(tmp_path, f"resume={tmp_path}", "stop=none", "steps=5")
        assert summary(tmp_path)["state"] == "completed" and rows(tmp_path, "train/loss").__len__() == 5
