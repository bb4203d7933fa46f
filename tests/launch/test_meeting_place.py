"""Where ranks meet: the folder of a launch's own, and the store of tasks that only know their job."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from isobatch.errors import ConfigError, JobFailed
from isobatch.launch import meeting, spawn
from isobatch.runtime.distributed import Ranks


def test_what_a_killed_launcher_left_is_removed_and_what_is_used_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours, lock = spawn.meeting_folder()
    left, strange = tmp_path / f"{spawn.MEETING}left", tmp_path / f"{spawn.MEETING}strange"
    for folder in (left, strange):
        folder.mkdir()
        (folder / "store").touch()
    (left / spawn.LOCK).touch()  # as a process leaves it that is gone: its lock went with it
    second, other = spawn.meeting_folder()
    assert sorted(tmp_path.iterdir()) == sorted([ours, second, strange])
    os.close(lock)
    third, last = spawn.meeting_folder()
    assert sorted(tmp_path.iterdir()) == sorted([second, strange, third])
    os.close(other)
    os.close(last)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> str:
    environ: dict[str, str] = {}
    meeting.by_job(name := uuid.uuid4().hex, environ)
    for key, value in {**environ, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(key, value)
    return name


def listening(port: int) -> socket.socket:
    taken = socket.socket()
    with suppress(OSError):  # taken is taken, by whomever
        taken.bind(("", port))
        taken.listen()
    return taken


def test_tasks_of_a_job_meet_beside_other_programs_and_other_jobs(job: str) -> None:
    """Of its ports the first is another program's, and the second has the store of another job."""
    ports = meeting.ports_of(job)
    with listening(ports[0]):
        with suppress(RuntimeError):  # taken is taken
            foreign = dist.TCPStore("127.0.0.1", ports[1], 2, True, wait_for_workers=False)
            foreign.set("job/another", "1")
        found: list[Any] = []
        follower = threading.Thread(target=lambda: found.append(meeting.served(Ranks(1, 2), 60)), daemon=True)
        follower.start()  # before there is anything to find
        mine = meeting.served(Ranks(0, 2), 60)
        mine.set("word", "of rank 0")
        follower.join(60)
        assert found[0].get("word") == b"of rank 0" and mine.port in ports[2:]


def test_nobody_to_meet_is_said(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobFailed, match=r"^nothing was heard of rank 0 within 0 s$"):
        meeting.served(Ranks(1, 2), 0.1)
    port = meeting.ports_of(job)[0]
    monkeypatch.setattr(meeting, "ports_of", lambda job: [port])
    with listening(port), pytest.raises(ConfigError, match=f"^MASTER_PORT={port}: port {port} is in use on this machine; set "):
        meeting.served(Ranks(0, 2), 60)
