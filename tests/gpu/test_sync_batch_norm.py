"""model.batch_norm=sync is torch's SyncBatchNorm, on ranks that all have a shard in every micro step; else it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import on_ranks, train
from jobs import job
from pretended import strictly
from torch import nn

from isobatch import run
from isobatch.errors import ConfigError
from isobatch.runtime.distributed import Ranks
from isobatch.train.batch_norm import synchronised

pytestmark = pytest.mark.gpu_pretended
EVEN = "batch.effective=24", "batch.micro=6", "batch.shard=null", "sampler.tail=drop"  # four shards


def on_two(folder: Path, made: dict[str, Any]) -> list[Any]:
    def work(ranks: Ranks) -> Any:
        kinds: list[str] = []
        with strictly(2) as machine:
            look = {"observe": lambda state, parts, data: kinds.append(type(state.model.stem[1]).__name__)}
            record = train(folder, made=made, ranks=ranks, **look)
        return record.weights, set(kinds), machine.launches["batch_norm_stats"]

    return on_ranks(2, folder, work)


def test_two_ranks_normalise_as_one_device_with_both_shards(tmp_path: Path) -> None:
    """Shards of 6 on two ranks, normalised together, are shards of 12 on one: no dropout, which follows the shards."""
    words = *EVEN, "optimizer.lr=0.1"
    quiet = {"quiet": True}
    expected = train(tmp_path / "one", made=job(*words, "batch.micro=12", "batch.shard=null", **quiet)).weights
    shard = train(tmp_path / "shard", made=job(*words, **quiet)).weights
    made = job(*words, "parallel=ddp", "checkpoint=default", batch_norm="sync", **quiet)
    for weights, kinds, joint_forwards in on_two(tmp_path / "sync", made):
        assert kinds == {"SyncBatchNorm"} and joint_forwards > 0
        assert torch.allclose(torch.tensor(weights), torch.tensor(expected), atol=2e-6)
    assert not torch.allclose(torch.tensor(shard), torch.tensor(expected), atol=1e-4)
    resumed = job(*words, f"resume={tmp_path / 'sync'}", "steps=6", batch_norm="sync", **quiet)
    with strictly(1), pytest.raises(ConfigError, match=r"parallel\.nproc 2 -> 1|trained with parallel.nproc=2"):
        run.run_job(resumed, tmp_path / "resumed", Ranks())


def test_frozen_layers_and_parameters_stay_what_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(3).eval()), nn.Linear(2, 2))
    weight, frozen = model[0].weight, model[1][0]
    made = synchronised(model)
    assert made is model and type(model[0]) is nn.SyncBatchNorm and model[0].weight is weight
    assert model[1][0] is frozen and type(frozen) is nn.BatchNorm1d
    assert type(synchronised(nn.BatchNorm2d(2))) is nn.SyncBatchNorm


@pytest.mark.parametrize(("words", "said"), [
    (("parallel=dp",), r"model.batch_norm=sync.*parallel=dp"),
    (("reduction=exact",), r"model.batch_norm=sync.*reduction=fast"),
    (("parallel=fsdp",), r"model.batch_norm=sync"),
    (("parallel=single",), None),
])  # fmt: skip
def test_where_it_cannot_be_it_is_refused_first(tmp_path: Path, words: tuple[str, ...], said: str | None) -> None:
    made = job(*words, "steps=1", "eval_every=1", batch_norm="sync")
    with strictly(1) as machine:
        if said is None:  # one rank has nobody to speak to: its own statistics
            run.run_job(made, tmp_path, Ranks())
            return
        with pytest.raises(ConfigError, match=said):
            run.run_job(made, tmp_path, Ranks())
        assert machine.shown is None  # no device was touched


def test_it_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a GPU, and this is cpu"):
        run.run_job(job(batch_norm="sync"), tmp_path, Ranks())


@pytest.mark.parametrize(("words", "said"), [
    (("batch.effective=24", "batch.micro=5",
      "batch.shard=null"), "5 shards on 2 ranks leave some without one"),  # a rank would wait for ever
    (("batch.effective=24", "batch.micro=1",
      "batch.shard=null", "data.samples=50"), "the last window of 2 samples leaves ranks without a shard"),
])  # fmt: skip
def test_ranks_without_a_shard_are_refused_on_all_ranks(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    def work(ranks: Ranks) -> str:
        with strictly(2), pytest.raises(ConfigError) as refusal:
            run.run_job(job(*words, "parallel=ddp", batch_norm="sync"), tmp_path, ranks)
        return str(refusal.value)

    for text in on_ranks(2, tmp_path, work):
        assert said in text
