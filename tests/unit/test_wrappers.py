"""DataParallel's shards and statistics, on copies that stand in for replicas on other devices."""

from __future__ import annotations

import copy

import torch
from torch import nn

from isobatch.parallel.wrappers import ShardedDataParallel, average_statistics


def test_running_statistics_are_the_mean_over_the_replicas() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    copies = [model, *(copy.deepcopy(model) for _ in range(2))]  # the first replica shares the model's buffers
    for value, replica in zip((1.0, 2.0, 6.0), copies, strict=True):
        replica[1].running_mean.fill_(value)
        replica[1].running_var.fill_(2 * value)
    average_statistics(model, copies)
    assert model[1].running_mean.tolist() == [3.0, 3.0]
    assert model[1].running_var.tolist() == [6.0, 6.0]


def test_chunk_i_is_shard_i() -> None:
    wrapped = ShardedDataParallel.__new__(ShardedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.device_ids = [torch.device("cpu")] * 4
    wrapped.shard_sizes = (3, 3, 2, 2)
    scattered, kwargs = wrapped.scatter((torch.arange(10),), {}, wrapped.device_ids)
    assert [c.tolist() for (c,) in scattered] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert len(kwargs) == 4
