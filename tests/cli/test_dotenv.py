"""`.env` in the working folder."""

from __future__ import annotations

from pathlib import Path

from isobatch.cli import dotenv


def test_what_is_taken_from_it(tmp_path: Path) -> None:
    environ = {"WANDB_MODE": "offline"}
    assert dotenv.read(tmp_path, environ) == []
    (tmp_path / ".env").write_text(
        "# keys\nexport WANDB_API_KEY=abc  # mine\nDATA_ROOT = \"/a b#c\"\nWANDB_MODE=online\nEMPTY=\nQ='x'\n\n"
        "LD_PRELOAD=/tmp/x.so\nPATH=/tmp\nPYTHONPATH=/tmp\nno name\n")  # fmt: skip
    told = dotenv.read(tmp_path, environ)
    assert environ == {"WANDB_MODE": "offline", "WANDB_API_KEY": "abc", "DATA_ROOT": "/a b#c", "EMPTY": "", "Q": "x"}
    assert [line.split(" ")[1] for line in told] == ["LD_PRELOAD", "PATH", "PYTHONPATH", "line"]
    (tmp_path / ".env").write_bytes(b"\xff=1")
    assert dotenv.read(tmp_path, environ) == []
