"""What the launcher makes of an ending, and what it leaves in the run folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from harness import summary, train

from isobatch.errors import ConfigError, JobFailed, Stopped
from isobatch.launch.outcome import BLANK, Outcome, RankFailed, RunFolder, cause
from isobatch.planner.trial import explained
from isobatch.run_folder.files import RunFiles


def outcome_of(error: BaseException, rank: int = 0) -> Outcome:
    try:
        raise error
    except type(error) as raised:
        return Outcome.from_json(Outcome.of(raised, rank).to_json())


def test_an_outcome_raises_on_the_other_side_what_it_was_made_of() -> None:
    with pytest.raises(ConfigError, match=r"^model\.arch=null: no such model; try resnet50$"):
        outcome_of(ConfigError("model.arch", None, "no such model", "try resnet50")).raise_unless_done()
    with pytest.raises(Stopped) as stopped:
        outcome_of(Stopped(15)).raise_unless_done()
    assert str(Stopped(15)) == "stopped by SIGTERM"
    assert stopped.value.exit_code == 143
    with pytest.raises(RankFailed) as failed:
        outcome_of(ZeroDivisionError("one\nline"), rank=3).raise_unless_done()
    assert str(failed.value) == "rank 3: ZeroDivisionError: one line"
    assert failed.value.trace.count("Traceback") == 1
    assert Outcome("done", 0.5).raise_unless_done() == 0.5


def test_a_diagnosed_failure_needs_no_stack() -> None:
    assert outcome_of(JobFailed("train/loss is nan")).trace == "isobatch: train/loss is nan"


def test_the_earliest_failure_is_the_cause() -> None:
    done, late = Outcome("done", 1.0), Outcome("failed", line="late", at=2.0)
    early = Outcome("failed", line="early", at=1.0)
    assert cause([done, late, early]).line == "early"
    assert cause([done]) is done


def written(folder: Path) -> dict[str, object]:
    data: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return data


def test_a_missing_summary_is_written_and_the_log_has_the_reason(tmp_path: Path) -> None:
    RunFolder(tmp_path).settle(Outcome("failed", line="rank 1 was killed", trace="stack"))
    assert written(tmp_path) == {**BLANK, "state": "failed", "error": "rank 1 was killed"}
    assert (tmp_path / "train.log").read_text() == "stack\nisobatch: rank 1 was killed\n"


def test_a_folder_that_is_gone_does_not_hide_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RunFolder(tmp_path / "gone").settle(Outcome("failed", line="the reason"))
    assert "gone cannot be written (No such file or directory)" in caplog.text


def test_a_summary_of_this_run_is_kept_and_only_its_wrong_cause_corrected(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"state": "failed", "steps": 7, "error": "connection closed"}))
    folder.settle(Outcome("failed", line="mine", rank=0))
    assert written(tmp_path)["error"] == "connection closed"
    folder.settle(Outcome("failed", line="rank 1: cause", rank=1))
    assert written(tmp_path) == {"state": "failed", "steps": 7, "error": "rank 1: cause"}


def test_a_summary_of_an_earlier_run_does_not_hide_a_failure_but_survives_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"state": "completed"}))
    os.utime(tmp_path / "summary.json", ns=(1, 1))
    RunFolder(tmp_path).settle(Outcome("refused", line="x=1: no; y"))
    assert written(tmp_path) == {"state": "completed"}
    RunFolder(tmp_path).settle(Outcome("failed", line="killed"))
    assert written(tmp_path)["state"] == "failed"


def test_a_summary_that_cannot_be_written_hides_no_reason_and_fails_a_completed_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    files = RunFiles(tmp_path / "file" / "run", is_main=True)
    files.summary({"state": "failed"})
    with pytest.raises(JobFailed, match=r"summary\.json cannot be written \(Not a directory\)"):
        files.summary({"state": "completed"})


def test_a_folder_that_was_deleted_is_made_anew(tmp_path: Path) -> None:
    files = RunFiles(tmp_path / "gone", is_main=True)
    files.config("a: 1")
    files.plan({"world_size": 1})
    assert sorted(path.name for path in (tmp_path / "gone").iterdir()) == ["config.yaml", "plan.json"]


def test_a_long_value_is_shown_short() -> None:
    assert len(str(ConfigError("data.root", "x" * 3000, "is not there", "set another"))) < 400
    assert len(str(ConfigError("data.root", "x" * 3000, "y " * 3000, "z" * 3000))) < 1600


@pytest.mark.parametrize(("error", "says"), [
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 22500000000 bytes. Error"),
     "out of memory (21.0 GiB more were wanted); set batch.micro="),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has"), "(20.00 MiB more were wanted)"),
    (MemoryError(), "out of memory; set batch.micro="),
])  # fmt: skip
def test_out_of_memory_is_one_line_with_a_way_out(error: BaseException, says: str) -> None:
    told = explained(error, 0)
    assert isinstance(told, JobFailed) and says in str(told)
    assert str(explained(error, 2)) == f"rank 2: {told}"
    other = ValueError("x")
    assert explained(other, 2) is other


def test_a_run_that_needs_more_memory_than_there_is_fails_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="GiB more were wanted"):
        train(tmp_path / "run", "model=mlp", "model.width=3000000", "epochs=null", "steps=1", "logger=none")
    assert summary(tmp_path / "run")["error"].startswith("out of memory")
