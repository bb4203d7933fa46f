"""`cuda_graph: null`: a run whose device waits for the host says so once, from its first steps; nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import summary
from jobs import job
from pretended import Machine, strictly
from pretended.streams import Event

from isobatch import run
from isobatch.data.feed import Feed
from isobatch.runtime.distributed import Ranks
from isobatch.train import pace

pytestmark = pytest.mark.gpu_pretended
STEPS = "steps=8", "eval_every=8", "log_every=1", "data.samples=28", "batch.effective=14"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "isobatch")
    monkeypatch.setattr(pace, "FIRST", 2)
    monkeypatch.setattr(pace, "LOOKED_AT", 4)


def trained(folder: Path, made: dict[str, Any]) -> Machine:
    """Not through the harness, which reads the weights after every step: behind that the device is always done."""
    with strictly() as machine:
        run.run_job(made, folder, Ranks())
    return machine


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [line for line in caplog.messages if line.startswith("the device waits")]
    caplog.clear()
    return found


def test_it_is_said_once_where_the_device_has_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                            caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    """The pretended device is done with nothing before somebody waits for it; `query` is what a fast one would answer."""
    busy = trained(tmp_path / "busy", job(*STEPS))
    assert said(caplog) == []
    monkeypatch.setattr(Event, "query", lambda self: True)
    idle = trained(tmp_path / "idle", job(*STEPS))
    (line,) = said(caplog)
    assert "cuda_graph=true" in line
    assert busy.syncs == idle.syncs and busy.launches == idle.launches
    assert summary(tmp_path / "busy")["weights_sha256"] == summary(tmp_path / "idle")["weights_sha256"]


def test_what_waits_for_data_is_told_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                          caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    monkeypatch.setattr(Event, "query", lambda self: True)
    original = Feed.next

    def slow(self, batches):
        self.waited += 1e9
        return original(self, batches)

    monkeypatch.setattr(Feed, "next", slow)
    trained(tmp_path, job(*STEPS))
    (line,) = said(caplog)
    assert "data.num_workers" in line and "cuda_graph" not in line


@pytest.mark.parametrize("words", ["cuda_graph=false", "reduction=exact", "precision=O2"])
def test_where_nothing_can_be_told_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str,
                                              caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    """Asked not to; graphs would be refused; every step waits for the device anyway."""
    monkeypatch.setattr(Event, "query", lambda self: True)
    trained(tmp_path, job(*STEPS, words))
    assert said(caplog) == []


def test_behind_an_evaluation_everything_is_done_on_any_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    monkeypatch.setattr(Event, "query", lambda self: True)
    trained(tmp_path / "often", job(*STEPS, "eval_every=1"))
    assert said(caplog) == []
