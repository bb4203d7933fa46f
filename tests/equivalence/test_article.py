"""The article's experiment: one process with accumulation ends on the weights of stock DDP with DistributedSampler."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from harness import on_ranks, rows, train, train_ranks
from torch.utils.data import DataLoader, DistributedSampler

from isobatch.runtime.distributed import Ranks

TWO = [0.857581, 0.790217, 0.843213, 0.886188]
THREE = [0.883654, 0.835148, 0.880524, 0.912118]
ARTICLE = ("experiment=article", "threads=1", "log_weights=16")


def stock(ranks: Ranks) -> list[list[float]]:
    """The article's script on stock PyTorch: the weights after each epoch."""
    torch.manual_seed(0)
    rows = torch.rand(16, 16)
    layer = torch.nn.Linear(16, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    model = torch.nn.parallel.DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sampler: DistributedSampler = DistributedSampler(range(16), ranks.world_size, ranks.rank, shuffle=False)
    weights = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in DataLoader(range(16), batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            model(rows[batch]).sum().backward()
            optimizer.step()
        weights.append([w for row in layer.weight.tolist() for w in row])
    return weights


@pytest.mark.parametrize(("shards", "begin"), [(2, TWO), pytest.param(3, THREE, marks=pytest.mark.slow)])
def test_every_plan_ends_on_stock_ddps_weights(tmp_path: Path, shards: int, begin: list[float]) -> None:
    expected = on_ranks(shards, tmp_path / "stock", stock)[0]
    assert expected[-1][:4] == pytest.approx(begin, abs=1e-6)
    contract = (*ARTICLE, f"batch.effective={4 * shards}")
    train(tmp_path / "accumulation", *contract, f"accumulation={shards}")
    train(tmp_path / "dp", *contract, "parallel=dp", f"parallel.replicas={shards}")
    train(tmp_path / "exact", *contract, "reduction=exact")
    train_ranks(shards, tmp_path / "ddp", *contract)
    plans = ["accumulation", "dp", "exact", "ddp"]
    if shards == 2:
        train_ranks(3, tmp_path / "more ranks than shards", *contract)
        plans.append("more ranks than shards")
    for plan in plans:
        found = rows(tmp_path / plan, "weights")
        assert len(found) == 2, plan
        for epoch in range(2):
            assert found[epoch] == pytest.approx(expected[epoch], abs=2e-6), plan


def test_the_epoch_is_padded_as_distributed_sampler_does(tmp_path: Path) -> None:
    record = train(tmp_path, *ARTICLE, "batch.effective=12", "epochs=1")
    assert [sorted(ids) for ids in record.ids] == [list(range(12)), [0, 1, 12, 13, 14, 15]]


def test_the_articles_defaults_are_no_ddp(tmp_path: Path) -> None:
    """Three steps with a sampler for two: another number of updates, and weights of neither two nor three processes."""
    path = Path(__file__).parents[2] / "examples/article_pitfall/pitfall.py"
    spec = importlib.util.spec_from_file_location("pitfall", path)
    assert spec is not None and spec.loader is not None
    pitfall = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pitfall)
    (article, theirs), (ours, mine) = pitfall.main(str(tmp_path / "run")).values()
    assert (theirs, mine) == (2, 4) and ours[:4] == pytest.approx(THREE, abs=1e-6)
    two = pitfall.order(2, pad=False)
    meant, updates = pitfall.accumulate(2, [two[i : i + 4] for i in range(0, 16, 4)])
    assert updates == 4 and meant[:4] == pytest.approx(TWO, abs=1e-6)  # with two steps its sampler is right
    assert min(abs(a - b) for other in (TWO, THREE) for a, b in zip(article, other, strict=False)) > 1e-3
