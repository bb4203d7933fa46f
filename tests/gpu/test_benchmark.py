"""benchmarks/gpu.py at a small size on a pretended GPU: it is run on a machine that is lent for minutes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pretended import pretend
from pretended.graphs import recording_graphs

from isobatch import hydra_patches

pytestmark = pytest.mark.gpu_pretended
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu_benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with hydra_patches.active():  # the benchmark leaves them in force
        yield importlib.import_module("gpu")
    for file in BENCHMARKS.glob("[a-z]*.py"):  # __main__ is the tests' own
        sys.modules.pop(file.stem, None)


def measured(benchmark: Any, out: Path, *words: str) -> list[list[str]]:
    with pretend(), recording_graphs():
        assert benchmark.main(["--out", str(out), "--small", *words]) == 0
    return json.loads((out / "gpu.json").read_text())["rows"]


@pytest.mark.parametrize("sections", [
    ("networks",),
    pytest.param(("reduction", "graphs", "planner", "files"), marks=pytest.mark.slow),
])  # fmt: skip
def test_every_row_is_measured(gpu_benchmark: Any, tmp_path: Path, sections: tuple[str, ...]) -> None:
    rows = measured(gpu_benchmark, tmp_path, "--only", *sections)
    assert len(rows) == sum({"networks": 2, "graphs": 2}.get(section, 1) for section in sections)
    assert not [row for row in rows if "failed" in row or "left out" in row]
    assert all(f"| {what} |" in (tmp_path / "gpu.md").read_text() for what, _, _ in rows)


@pytest.mark.slow  # imports the compiler
def test_what_does_not_fit_is_left_out_and_what_fails_does_not_end_it(gpu_benchmark: Any, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    rows = measured(gpu_benchmark, tmp_path / "late", "--seconds", "-1")
    assert {row[1] for row in rows} == {"left out"} and len(rows) == 8
    monkeypatch.setattr(gpu_benchmark, "ours", lambda *args: 1 / 0)
    assert gpu_benchmark.main(["--out", str(tmp_path / "bad"), "--small", "--only", "reduction", "compiled"]) == 1
    assert [row[1:] for row in json.loads((tmp_path / "bad" / "gpu.json").read_text())["rows"]] == [
        ["failed", "ZeroDivisionError: division by zero"]] * 2  # fmt: skip
