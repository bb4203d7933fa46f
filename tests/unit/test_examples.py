"""The folders of examples/: each trains in the words of its README, and says what it promises."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import plain, rows, summary

from isobatch import run
from isobatch.runtime.distributed import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
FEW = ("logger=none", "threads=1", "log_every=1", "data.num_workers=0", "epochs=null")


def words_of(example: str) -> list[str]:
    """The command of its README, after train.py."""
    text = (EXAMPLES / example / "README.md").read_text().replace("\\\n", " ")
    return shlex.split(re.findall(r"train\.py (.*)", text)[0])


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    name, module = request.param
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    importlib.invalidate_caches()
    yield words_of(name)
    sys.modules.pop(module, None)


@pytest.mark.parametrize("example", [("tokens", "gpt")], indirect=True)
def test_tokens_weigh_alike_however_lines_are_cut(tmp_path: Path, example: list[str]) -> None:
    few = ("+data.kwargs.lines=90", "+model.kwargs.width=16", "steps=4", "eval_every=4", "optimizer.lr=0.02",
           "batch.effective=16", "batch.shard=4")  # fmt: skip
    for micro in (4, 16):
        run.run_job(plain(*example, *FEW, *few, f"batch.micro={micro}"), tmp_path / f"{micro}", Ranks())
    for key in ("train/loss", "eval/loss", "eval/perplexity", "eval/accuracy"):
        values = [rows(tmp_path / f"{micro}", key) for micro in (4, 16)]
        assert values[0] and values[0] == pytest.approx(values[1], rel=1e-4)
    assert summary(tmp_path / "4")["final"]["eval/perplexity"] < 90  # of 96 letters


@pytest.mark.parametrize("example", [("contrastive", "pairs")], indirect=True)
def test_a_loss_of_pairs_and_a_metric_of_ones_own(tmp_path: Path, example: list[str]) -> None:
    few = ("steps=2", "eval_every=1", "batch.effective=64", "batch.shard=32")
    for micro in (32, 64):
        run.run_job(plain(*example, *FEW, *few, f"batch.micro={micro}"), tmp_path / f"{micro}", Ranks())
    for key in ("train/loss", "eval/neighbours"):
        values = [rows(tmp_path / f"{micro}", key) for micro in (32, 64)]
        assert len(values[0]) == 2 and values[0] == pytest.approx(values[1], rel=1e-4, abs=0.01)
    assert summary(tmp_path / "32")["best"]["eval/neighbours"] > 0.6
