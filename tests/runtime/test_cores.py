"""How many cores a process may use: affinity and the quotas of control groups, v1 and v2, as files; and
what it does about cores that others use too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from isobatch.runtime import cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture(autouse=True)
def _sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)), raising=False)


def usable(tmp_path: Path) -> int:
    return cores.usable(tmp_path / "cgroup", tmp_path / "self")


@pytest.mark.parametrize(("files", "own", "expected"), [
    ({}, "", 16),
    ({"cpu.max": "max 100000"}, "0::/", 16),
    ({"cpu.max": "200000 100000"}, "0::/", 2),
    ({"cpu.max": "50000 100000"}, "0::/", 1),  # half a core is one
    ({"cpu.max": "350000 100000"}, "0::/", 3),
    ({"cpu.max": "9900000 100000"}, "0::/", 16),
    ({"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, "0::/a/b", 4),  # a group above limits too
    ({"a/b/cpu.max": "300000 100000", "a/cpu.max": "400000 100000"}, "0::/a/b", 3),
    ({"cpu.max": "200000 100000"}, "0::/../../docker/x", 2),  # the host's path, seen from the container
    ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/", 2),
    ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/", 16),
    ({"cpu,cpuacct/job/cpu.cfs_quota_us": "500000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/job", 5),
    ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/docker/of/the/host", 1),
    ({"cpu.max": "nonsense"}, "0::/", 16),
    ({"cpu.max": ""}, "0::/\ngarbage\n::", 16),
], ids=str)  # fmt: skip
def test_the_quota_of_a_container_counts(tmp_path: Path, files: dict[str, str], own: str, expected: int) -> None:
    for name, text in files.items():
        write(tmp_path / "cgroup" / name, text)
    write(tmp_path / "self", own)
    assert usable(tmp_path) == expected


def test_a_system_without_affinity_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert cores.numbers() == [] and usable(tmp_path) == 6
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert usable(tmp_path) == 1


def test_affinity_counts_where_it_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5})
    write(tmp_path / "cgroup" / "cpu.max", "400000 100000")
    assert usable(tmp_path) == 2 and cores.numbers() == [3, 5]


SAID = """
import os, sys
from isobatch.cli.command import main
sys.argv = ["train.py", "--config-dir=nowhere"]
try: main()
except SystemExit: pass
print("torch" in sys.modules, os.environ.get("GOMP_SPINCOUNT"), os.environ.get("KMP_BLOCKTIME"))
"""


def test_the_command_lets_threads_sleep_before_torch_starts_any(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", *cores.WAITING):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", SAID], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False 1000 1"


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_what_a_person_has_set_stays(name: str) -> None:
    environ = {name: "5"}
    cores.let_go(environ)
    assert environ == {name: "5"}


@pytest.mark.parametrize(("text", "share"), [
    ("3000000000 1000000000 7", 0.25), ("1000000000 0 7", 0.0), ("100000000 200000000 7", None), ("", None), ("x y", None),
])  # fmt: skip
def test_a_process_knows_how_long_it_has_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str,
                                               share: float | None) -> None:  # fmt: skip
    monkeypatch.setattr(cores, "LEAST_S", 1.0)
    write(tmp_path / "schedstat", text)
    assert cores.waited(tmp_path / "schedstat") == share and cores.waited(tmp_path / "none") is None


def test_there_is_one_place_that_asks() -> None:
    source = Path(cores.__file__).parents[1]
    asking = {str(path.relative_to(source)) for path in source.rglob("*.py") if "sched_getaffinity" in path.read_text()}
    assert asking == {"runtime/cores.py"}
    counting = {str(path.relative_to(source)) for path in source.rglob("*.py") if "cpu_count" in path.read_text()}
    assert counting <= {"runtime/cores.py", "doctor.py"}  # the doctor tells both numbers
