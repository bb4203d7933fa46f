"""DataParallel's shards and statistics."""

from __future__ import annotations

import pytest
import torch
from pretended import Machine
from torch import nn

from isobatch.parallel.wrappers import ShardedDataParallel
from isobatch.shards.layout import Lanes


@pytest.mark.gpu_pretended(3)
def test_running_statistics_are_the_mean_over_the_replicas(gpu: Machine) -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=1.0), nn.BatchNorm1d(2).eval()).to("cuda")
    wrapped = ShardedDataParallel(model, [torch.device("cuda", i) for i in range(3)])
    wrapped.lanes = Lanes.alone((2, 2, 2))
    shards = [torch.tensor([[v - 1.0, v], [v + 1.0, v]]) for v in (1.0, 2.0, 6.0)]
    wrapped(torch.cat(shards).to("cuda")).sum().backward()
    assert model[0].running_mean.tolist() == [3.0, 3.0]
    assert model[0].running_var.tolist() == [2.0, 0.0]
    assert model[1].running_mean.tolist() == [0.0, 0.0]  # it does not learn


def test_chunk_i_is_shard_i() -> None:
    wrapped = ShardedDataParallel.__new__(ShardedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.device_ids = [torch.device("cpu")] * 4
    wrapped.lanes = Lanes.alone((3, 3, 2, 2))
    scattered, kwargs = wrapped.scatter((torch.arange(10),), {}, wrapped.device_ids)
    assert [c.tolist() for (c,) in scattered] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert len(kwargs) == 4
