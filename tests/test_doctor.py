"""`isobatch doctor` and the other verbs of the command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isobatch import __version__, doctor
from isobatch.cli.verbs import VERBS, run_verb
from isobatch.doctor import Finding


def test_a_whole_machine_is_found_fit_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "a training can start here" in said and len(said.splitlines()) <= 24
    for what in ("isobatch", "torch ", "devices", "cores", "disk", "W&B"):
        assert what in said


def test_what_is_broken_is_said_and_the_exit_code_tells(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    def check_torch() -> Iterator[Finding]:
        raise ImportError("libcudart.so.13: cannot open shared object file\nsecond line")
        yield

    found = doctor.examine((check_torch,))
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.ok("a", "fine"), *found])
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "x torch" in said and "libcudart.so.13" in said and "1 problem" in said


def test_a_missing_package_and_a_small_shared_memory(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda package: None if package in ("timm", "optuna") else "1")
    found = list(doctor.check_packages())
    assert [f.text for f in found if f.level == "bad"] == ["missing: timm; pip install -e . -c constraints.txt"]
    assert any("optuna (hydra/sweeper=search)" in f.text for f in found if f.level == "note")


def test_a_folder_that_cannot_be_written(monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert {f.level for f in doctor.check_disk()} == {"bad"}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_a_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        run_verb([verb, "--help"])
    assert leaving.value.code == 0 and "usage" in capsys.readouterr().out


def test_the_command_knows_its_version_and_its_verbs(tmp_path: Path) -> None:
    code = "import sys; sys.argv[1:] = ['--version']; from isobatch.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, f"isobatch {__version__}\n")
    assert run_verb(["compare", str(tmp_path / "nothing")]) == 2
    assert run_verb([]) is None and run_verb(["steps=3"]) is None
