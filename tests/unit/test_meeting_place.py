"""The folder in which a launch's own ranks meet."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from isobatch.launch import spawn


def test_what_a_killed_launcher_left_is_removed_and_what_is_used_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours, lock = spawn.meeting_place()
    left, strange = tmp_path / f"{spawn.MEETING}left", tmp_path / f"{spawn.MEETING}strange"
    for folder in (left, strange):
        folder.mkdir()
        (folder / "store").touch()
    (left / spawn.LOCK).touch()  # as a process leaves it that is gone: its lock went with it
    second, other = spawn.meeting_place()
    assert sorted(tmp_path.iterdir()) == sorted([ours, second, strange])
    os.close(lock)
    third, last = spawn.meeting_place()
    assert sorted(tmp_path.iterdir()) == sorted([second, strange, third])
    os.close(other)
    os.close(last)
