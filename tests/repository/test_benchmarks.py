"""The benchmarks run and compare the same work: what they measure is not looked at."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isobatch import hydra_patches
from isobatch.runtime.distributed import Ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with hydra_patches.active():  # a benchmark leaves them in force
        yield importlib.import_module(request.param)
    for file in BENCHMARKS.glob("[a-z]*.py"):  # __main__ is the tests' own
        sys.modules.pop(file.stem, None)


@pytest.mark.parametrize("benchmark", ["loop"], indirect=True)
@pytest.mark.parametrize("words", [["batch.effective=8"], ["batch.effective=8", "batch.micro=4"]])
def test_the_hand_written_loop_trains_what_ours_trains(benchmark, tmp_path: Path, words: list[str]) -> None:
    loop, ours = benchmark.isobatch_loop([*benchmark.TOY, *words], Ranks(), tmp_path)
    models: list[torch.nn.Module] = []
    raw = benchmark.raw_loop(loop, Ranks(), models.append)
    before = [p.detach().clone() for p in loop.state.model.parameters()]
    ours(3)
    raw(3)
    loop.files.close()
    for theirs, mine, start in zip(models[0].parameters(), loop.state.model.parameters(), before, strict=True):
        assert not torch.equal(mine, start)
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("benchmark", ["table"], indirect=True)
def test_every_benchmark_is_in_the_table(benchmark) -> None:
    others = {"__main__", "table", "contenders", "gpu", "gpu_ladder", "audit", "lanes"}  # tables of their own
    assert set(benchmark.NAMES) | others >= {file.stem for file in BENCHMARKS.glob("*.py")}
    for name in benchmark.NAMES:
        assert callable(importlib.import_module(name).rows)


def test_the_table_is_one_command() -> None:
    done = subprocess.run([sys.executable, str(BENCHMARKS), "--list"], capture_output=True, text=True, check=True)
    assert "loop" in done.stdout.split()
    refused = subprocess.run([sys.executable, str(BENCHMARKS), "speed"], capture_output=True, text=True)
    assert refused.returncode == 2 and "speed is none of loop" in refused.stderr
