"""The folders of examples/: each trains in the words of its README, and says what it promises."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import on_ranks, plain, rows, summary

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


@pytest.mark.slow
@pytest.mark.parametrize("example", [("detection", "shapes")], indirect=True)
def test_boxes_and_a_model_that_returns_its_losses(tmp_path: Path, example: list[str]) -> None:
    words = [word for word in example if not word.startswith(("checkpoint.best", "metrics.names"))]
    few = ("+data.kwargs.pictures=10", "steps=1", "eval_every=1", "batch.effective=8", "batch.shard=4",
           "metrics.names=[IntersectionOverUnion]", "batch.eval=1")  # fmt: skip
    run.run_job(plain(*words, *FEW, *few), tmp_path / "1", Ranks())
    on_ranks(2, tmp_path / "2", lambda ranks: run.run_job(plain(*words, *FEW, *few, "parallel=ddp"), tmp_path / "2", ranks))
    for key in ("train/loss", "eval/loss", "eval/iou"):
        values = [rows(tmp_path / f"{ranks}", key) for ranks in (1, 2)]
        assert values[0] and values[0] == pytest.approx(values[1], rel=1e-3)


@pytest.mark.parametrize("example", [("detection", "shapes")], indirect=True)
def test_a_window_is_the_mean_over_its_places(example: list[str]) -> None:
    """torchvision's own loss of all pictures at once, from two shards with different numbers of places."""
    shapes = importlib.import_module("shapes")
    data, network = shapes.Shapes("train", 8), shapes.Detector(2, 3)
    batch = lambda first, last: shapes.collate([data[i] for i in range(first, last)])  # noqa: E731
    parts = [shapes.places(network(**{**inputs, "images": inputs["images"] / 255}), None)["loss"]
             for inputs, _ in (batch(0, 2), batch(2, 8))]  # fmt: skip
    inputs, _ = batch(0, 8)
    there = [{"boxes": b[k >= 0], "labels": k[k >= 0]} for b, k in zip(inputs["boxes"], inputs["labels"], strict=True)]
    shapes.Head.compute_loss, own = shapes.FCOSHead.compute_loss, shapes.Head.compute_loss
    try:
        whole = sum(network.net(list(inputs["images"] / 255), there).values())
    finally:
        shapes.Head.compute_loss = own
    assert parts[1].count.item() != 3 * parts[0].count.item()
    mean = sum(part.total for part in parts) / sum(part.count for part in parts)
    assert mean.item() == pytest.approx(whole.item(), rel=1e-5)
