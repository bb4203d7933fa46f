"""`logger=trackio`: a run in a local database, gone on with by a resumed one; what trackio raises costs no training."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from isobatch.config import options
from isobatch.errors import ConfigError
from isobatch.logger import RunInfo

PLAN = {"effective_batch": 48, "num_shards": 3}


class Recorder(types.ModuleType):
    """A stand-in that keeps what it is called with."""

    def __init__(self, raises: bool = False) -> None:
        super().__init__("trackio")
        self.calls: list[tuple[str, Any, Any]] = []
        self.raises = raises

    def _called(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        print("* Trackio project initialized")
        self.calls.append((name, args, kwargs))
        if self.raises:
            raise OSError("disk full")

    def init(self, **kwargs: Any) -> None:
        self._called("init", **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        self._called("log", *args, **kwargs)

    def finish(self) -> None:
        self._called("finish")


def recorded(monkeypatch: pytest.MonkeyPatch, folder: Path, run_id: str | None = None, raises: bool = False) -> Recorder:
    trackio = Recorder(raises)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    logger = options("logger", {"name": "trackio", "project": "mine"}).build(RunInfo(folder, {"seed": 3}))
    logger.start(PLAN, run_id)
    logger.log({"step": 1, "samples": 48, "train/loss": 0.5, "weights": [1.0]})
    logger.finish({"state": "completed", "samples": 48, "best": {"eval/accuracy": 0.9}}, 0)
    assert logger.run_id and logger.how_to_look == ["trackio show --project mine"]
    return trackio


def test_what_trackio_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (begin, row, last, end) = recorded(monkeypatch, tmp_path / "2030-01-01" / "10.00").calls
    assert begin[0] == "init" and begin[2]["name"] == "2030-01-01_10-00" and begin[2]["resume"] == "never"
    assert begin[2]["config"]["plan/effective_batch"] == 48 and begin[2]["config"]["seed"] == 3
    assert row[1:] == (({"step": 1, "samples": 48, "train/loss": 0.5},), {"step": 48})
    assert last[1][0]["best/eval/accuracy"] == 0.9 and end[0] == "finish"
    (again, *_) = recorded(monkeypatch, tmp_path / "other", run_id="2030-01-01_10-00").calls
    assert again[2]["name"] == "2030-01-01_10-00" and again[2]["resume"] == "allow"
    assert capsys.readouterr().out == ""


def test_what_it_raises_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    recorded(monkeypatch, tmp_path, raises=True)
    assert caplog.messages == ["trackio: not recorded (disk full); metrics are in metrics.jsonl"]


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^logger=trackio: .*not installed; pip install 'isobatch\[trackio\]'"):
        options("logger", {"name": "trackio"}).check()


def test_a_run_and_its_resume_in_the_real_database(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    environ = {**os.environ, "TRACKIO_DIR": str(tmp_path / "db"), "HF_HUB_OFFLINE": "1"}
    words = ["model=mlp", "logger=trackio", "epochs=null", "log_every=1", "hydra.run.dir=first"]
    train = [sys.executable, str(Path(__file__).parents[2] / "train.py"), *words]
    for more in (["steps=2"], ["resume=first", "steps=3"]):
        done = subprocess.run([*train, *more], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "trackio show --project isobatch" in done.stdout
    (file,) = (tmp_path / "db").glob("isobatch*.db")
    with sqlite3.connect(file) as database:
        names = {name for (name,) in database.execute("SELECT DISTINCT run_name FROM metrics")}
        steps = {step for (step,) in database.execute("SELECT step FROM metrics")}
    database.close()
    assert len(names) == 1 and {48, 96, 144} <= steps
