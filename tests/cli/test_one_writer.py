"""A run folder has one writer: the second command is refused, whatever it is, and a dead one is in nobody's way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from launching import COMMAND, Started, left_over, run, summary

from isobatch.errors import ConfigError
from isobatch.run_folder import lock
from isobatch.run_folder.lock import NAME, Owner, held


@pytest.mark.timeout(200)
def test_a_second_command_in_a_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    started = Started([*COMMAND, "hydra.run.dir=run"], tmp_path, STANDIN="sleep")
    started.wait_for(tmp_path / "run/ready0")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    second = run([*COMMAND, "hydra.run.dir=run", "seed=7"], tmp_path)
    assert second.code == 2
    (line,) = second.own_lines()
    assert line.startswith(f"isobatch: hydra.run.dir={tmp_path}/run: process {started.process.pid} on ")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    started.process.send_signal(signal.SIGKILL)  # the lock stays behind, and its owner is dead
    started.ended()
    assert (tmp_path / "run" / NAME).exists() and left_over(tmp_path) == []
    third = run([*COMMAND, "hydra.run.dir=run"], tmp_path)
    assert third.code == 0, third.err
    assert summary(tmp_path / "run")["state"] == "completed"
    assert not (tmp_path / "run" / NAME).exists()
    assert (tmp_path / "run/.hydra/overrides.yaml").read_text() == "[]\n"


def other(folder: Path, **changes: object) -> subprocess.Popen[str]:
    """A process that holds `folder` until its standard input ends."""
    code = ("import sys; from pathlib import Path; from isobatch.run_folder.lock import held\n"
            f"with held(Path({str(folder)!r})): print('held', flush=True); sys.stdin.read()")  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", code], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == "held\n"
    return process


def test_the_kernel_knows_who_lives(tmp_path: Path) -> None:
    process = other(tmp_path)
    with pytest.raises(ConfigError, match=f"process {process.pid} on .* writes there"), held(tmp_path):
        pass
    process.kill()
    process.communicate()
    with held(tmp_path), held(tmp_path):
        owner = json.loads((tmp_path / NAME).read_text())
        assert (owner["pid"], owner["host"]) == (os.getpid(), os.uname().nodename)
    assert not (tmp_path / NAME).exists()


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows none."""

    def refused(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", refused)
    monkeypatch.setattr(lock, "SETTLE_S", 0.01)
    monkeypatch.setattr(lock, "TICK_S", 0.01)


def left_by(folder: Path, owner: Owner, age_s: float = 0.0) -> None:
    (folder / NAME).write_text(json.dumps(asdict(owner)))
    at = time.time() - age_s
    os.utime(folder / NAME, (at, at))


def test_without_the_kernels_help_a_process_is_looked_up(tmp_path: Path, no_locks: None) -> None:
    living = replace(Owner.this(), pid=os.getppid(), began=lock.started(os.getppid()))
    left_by(tmp_path, living)
    with pytest.raises(ConfigError, match=f"process {os.getppid()} on"), held(tmp_path):
        pass
    left_by(tmp_path, replace(living, began="1"))  # the number is another process's by now
    with held(tmp_path):
        pass


def test_a_writer_elsewhere_is_dead_when_it_has_been_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(lock, "SETTLE_S", 0.01)
    monkeypatch.setattr(lock, "TICK_S", 0.01)
    elsewhere = replace(Owner.this(), boot="another", host="node7", token="x")
    left_by(tmp_path, elsewhere, lock.STALE_S + 10)
    with held(tmp_path):
        assert capsys.readouterr().err == ""
    monkeypatch.setattr(lock, "STALE_S", 0.2)
    left_by(tmp_path, elsewhere, -1e6)  # a clock that is ahead, or a folder that came in an archive
    with held(tmp_path):
        assert "is held by process" in capsys.readouterr().err


def test_a_writer_elsewhere_that_lives_is_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "TICK_S", 0.01)
    left_by(tmp_path, replace(Owner.this(), boot="another", host="node7", token="x"))
    waited = iter(range(100))

    def meanwhile(seconds: float) -> None:
        os.utime(tmp_path / NAME, (next(waited), 0))

    monkeypatch.setattr(lock.time, "sleep", meanwhile)
    with pytest.raises(ConfigError, match="on node7 writes there"), held(tmp_path):
        pass


def test_a_restart_of_the_same_elastic_launch_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    monkeypatch.setattr(lock, "SETTLE_S", 0.01)
    left_by(tmp_path, replace(Owner.this(), boot="another", host="node7", token="x"))
    with held(tmp_path):
        assert capsys.readouterr().err == ""


def test_one_whose_place_was_taken_ends(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from isobatch.run_folder import lock\n"
        f"lock.BEAT_S = 0.05\nwith lock.held(Path({str(tmp_path)!r})):\n print('held', flush=True); time.sleep(100)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == "held\n"
    with (tmp_path / NAME).open("r+") as file:
        file.write(json.dumps(asdict(replace(Owner.this(), host="node7"))) + "\n")
    err = process.communicate(timeout=100)[1]
    assert process.returncode == 1 and "was taken over by process" in err


@pytest.mark.parametrize("text", ["", "[" * 4000, "{}", '{"pid": "x"}', "\0" * 5000, '{"pid": 1}'])
def test_a_damaged_lock_is_nobodys(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with held(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(ConfigError, match="is no regular file"), held(tmp_path):
        pass
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).symlink_to("/dev/null")
    with pytest.raises(ConfigError, match="cannot be written"), held(tmp_path):
        pass
    with pytest.raises(ConfigError, match="cannot be written"), held(tmp_path / "nowhere"):
        pass
