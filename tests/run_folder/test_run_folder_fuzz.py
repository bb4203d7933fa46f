"""Mutated real run folders: every reader ends with a result or one line, in time and memory that the folder's size bounds.

A few hundred in the fast suite, 10,000 in `make test-all`.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoint_tools import reseal
from harness import BASE, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from test_run_folder_reading import TEXTS, at_most, read_all, replace

from isobatch.report import read_runs
from isobatch.report.html import render
from isobatch.report.read import ReportError
from isobatch.report.table import tabulate
from isobatch.report.text import print_table, write_csv

GROWTH, ALLOWED = 4, 96 << 20  # bytes for a byte of the folder, and for any folder
FILES = (*TEXTS, "checkpoints/last/state.pt", "checkpoints/last/model.safetensors", "checkpoints/step-3/state.pt", "train.log")
ODD: list[Any] = [
    None, True, -1, 0, 2**70, 10**150, float("nan"), float("inf"), -0.0, "", "x" * 5000, "../../etc/passwd", "${oc.env:HOME}",
    "\x1b[2J", "<script>alert(1)</script>", [], {}, [[[]]], {"a": {"b": {}}}, "nan", 1e308, "é\u2028",
]  # fmt: skip
WORDS = [
    b"[" * 2000, b"{" * 50, b"&a [*a, *a]\n", b"!!python/object/apply:os.mkdir [owned]\n", b"\0" * 100, b"\xff\xfe",
    b"\n" * 500, b'"eval/loss": 1, ', b'{"step": 5, "train/loss": 0.1}\n', b"1" * 500, b"- seed=9\n", b"- imports=[evil]\n",
    b"<<: ",
]  # fmt: skip
PLACES = st.integers(0, 10**6)
mutations = st.lists(
    st.one_of(
        st.tuples(st.just("odd"), st.sampled_from(FILES), PLACES, st.sampled_from(ODD)),
        st.tuples(st.just("drop"), st.sampled_from(FILES), PLACES, st.none()),
        st.tuples(st.just("nest"), st.sampled_from(FILES), PLACES, st.integers(1, 40)),
        st.tuples(st.just("flip"), st.sampled_from(FILES), PLACES, st.integers(0, 7)),
        st.tuples(st.just("cut"), st.sampled_from(FILES), PLACES, st.none()),
        st.tuples(st.just("insert"), st.sampled_from(FILES), PLACES, st.sampled_from(WORDS)),
        st.tuples(st.just("repeat"), st.sampled_from(FILES), PLACES, st.integers(2, 60)),
        st.tuples(st.just("swap"), st.sampled_from(FILES), PLACES, st.sampled_from(FILES)),
        st.tuples(st.just("become"), st.sampled_from(FILES), PLACES,
                  st.sampled_from(["pipe", "folder", "ring", "device", "large", "line"])),
    ),
    min_size=1, max_size=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "run"
    train(folder, *BASE, "epochs=null", "steps=3", "log_every=1", "eval_every=2", "checkpoint.keep=1")
    (folder / ".hydra").mkdir()
    (folder / ".hydra/overrides.yaml").write_text("- model=mlp\n- steps=3\n- logger.tags=[a,b]\n")
    (folder / ".hydra/hydra.yaml").write_text("hydra:\n  mode: MULTIRUN\n  job:\n    num: 0\n  sweep:\n    subdir: '0'\n")
    (folder / ".hydra/config.yaml").write_text("steps: 3\n")
    (folder / "fingerprint.json").write_text('{"0/0": [["input", "ab"]]}')
    (folder / "train.log").write_text("[x] - y\n")
    return folder


def apply(folder: Path, kind: str, name: str, place: int, value: Any) -> None:
    path = folder / name
    if not path.is_file() or path.stat().st_size > 1 << 24:
        return
    if kind == "become":
        return replace(path, value)
    data = path.read_bytes()
    if not data and kind != "swap":
        return None
    at = place % (len(data) + 1)
    if kind in ("odd", "drop", "nest"):
        data = structured(data, name, kind, place, value)
    elif kind == "flip":
        data = data[: at - 1] + bytes([data[at - 1] ^ 1 << value]) + data[at:]
    elif kind == "cut":
        data = data[:at]
    elif kind == "insert":
        data = data[:at] + value + data[at:]
    elif kind == "repeat":
        data = data * value if len(data) < 100_000 else data
    elif kind == "swap" and (folder / value).is_file() and (folder / value).stat().st_size < 1 << 24:
        data = (folder / value).read_bytes()
    path.unlink()
    path.write_bytes(data)
    if path.name in ("state.pt", "model.safetensors") and place % 3:
        reseal_if_there(path.parent)
    return None


def reseal_if_there(path: Path) -> None:
    files = [path / name for name in ("state.pt", "model.safetensors", "manifest.json")]
    if not all(file.is_file() and file.stat().st_size < 1 << 24 for file in files):
        return
    try:
        reseal(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return


def structured(data: bytes, name: str, kind: str, place: int, value: Any) -> bytes:
    """One value of a JSON or YAML file made odd, dropped, or wrapped in lists."""
    try:
        rows = data.decode().splitlines() if name.endswith(".jsonl") else [data.decode()]
        at = place % len(rows)
        tree = [yaml.safe_load(rows[at]) if name.endswith(".yaml") else json.loads(rows[at])]
    except (ValueError, yaml.YAMLError, RecursionError):
        return data
    places = [(tree, 0)]
    for container, key in places:
        inner = container[key]
        if len(places) < 2000 and isinstance(inner, dict | list):
            places += [(inner, k) for k in (inner if isinstance(inner, dict) else range(len(inner)))]
    container, key = places[place % len(places)]
    if kind == "odd":
        container[key] = value
    elif kind == "drop" and container is not tree:
        del container[key]
    elif kind == "nest":
        for _ in range(value):
            container[key] = [container[key]]
    try:
        rows[at] = yaml.safe_dump(tree[0], allow_unicode=True) if name.endswith(".yaml") else json.dumps(tree[0])
    except ValueError:  # a number that cannot be written
        return data
    return "\n".join(rows).encode()


def peak() -> int:
    """Most bytes of memory since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def forget_peak() -> int:
    """Returns the memory in use, from which `peak` starts; 0 where it cannot be asked."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


def used(folder: Path) -> int:
    """Bytes of the folder's files on the disk: a file of holes has few."""
    return sum(512 * p.lstat().st_blocks for p in folder.rglob("*"))


def read_mutated(real: Path, where: Path, changes: list[tuple[str, str, int, Any]]) -> None:
    folder = where / "sweep" / "0"
    shutil.copytree(real, folder)
    try:
        for change in changes:
            apply(folder, *change)
        size, before = used(folder), forget_peak()
        with at_most():
            read_all(folder)
            with suppress(ReportError):  # its summary.json may be gone
                comparison = tabulate(read_runs([where / "sweep"]))
                assert "<script>alert" not in render(comparison, [folder])
                write_csv(comparison, where / "report.csv")
                print_table(comparison, Console(file=StringIO(), width=100))
        if before:
            assert peak() - before < GROWTH * size + ALLOWED
        assert not (Path.cwd() / "owned").exists()
    finally:
        shutil.rmtree(where / "sweep")


COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
          "database": None}  # fmt: skip


@settings(max_examples=30, derandomize=True, **COMMON)
@given(mutations)
def test_a_mutated_run_folder_is_read_or_named(real: Path, tmp_path: Path, changes: list[tuple[str, str, int, Any]]) -> None:
    read_mutated(real, tmp_path, changes)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=int(os.environ.get("ISOBATCH_FUZZ", "10000")), **COMMON)
@given(mutations)
def test_ten_thousand_mutated_run_folders(real: Path, tmp_path: Path, changes: list[tuple[str, str, int, Any]]) -> None:
    read_mutated(real, tmp_path, changes)
