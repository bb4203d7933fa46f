"""The same training on one CPU and on pretended devices: a small network with all that devices can get wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import Record, plain, summary
from harness import train as trained
from pretended import Machine, pretend
from torch import Tensor, nn

from isobatch import model as models
from isobatch.data import DataInfo


class Network(nn.Module):
    """Batch norm, dropout, attention and stochastic depth, small; `blocks` can be checkpointed, `head` is its classifier."""

    def __init__(self, info: DataInfo, width: int = 8, grad_checkpointing: bool = False, quiet: bool = False):
        super().__init__()
        from timm.layers import DropPath

        self.stem = nn.Sequential(nn.Conv2d(info.in_chans, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width),
                                  nn.ReLU())  # fmt: skip
        self.block = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.path, self.query = DropPath(0.0 if quiet else 0.2), nn.Linear(width, 3 * width)
        self.drop, self.head = nn.Dropout(0.0 if quiet else 0.2), nn.Linear(width, info.num_classes)
        self.grad_checkpointing = grad_checkpointing

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        if self.grad_checkpointing and self.training:
            made = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        else:
            made = self.block(x)
        x = (x + self.path(made)).flatten(2).transpose(1, 2)
        query, key, value = self.query(x).chunk(3, dim=2)
        x = x + nn.functional.scaled_dot_product_attention(query, key, value)
        return self.head(self.drop(x.mean(1)))


@dataclass(frozen=True)
class Probe:
    """As group `model`."""

    name: str = "gpu_probe"
    batch_norm: str = "shard"
    freeze: tuple[str, ...] = ()
    grad_checkpointing: bool = False
    quiet: bool = False  # without dropout and stochastic depth

    def build(self, info: DataInfo) -> nn.Module:
        return Network(info, grad_checkpointing=self.grad_checkpointing, quiet=self.quiet)


models.TABLE[Probe.name] = Probe

# 26 samples in four shards of 7 or 6; an epoch of 60 has a tail of 8
BASE = (
    "logger=none", "threads=1", "model=mlp", "data=synthetic", "data.samples=60", "data.eval_samples=20", "data.image_size=6",
    "data.in_chans=1", "batch.effective=26", "batch.micro=7", "batch.shard=null", "epochs=null", "steps=4", "log_every=1",
    "eval_every=2", "channels_last=false", "scheduler=constant", "optimizer=sgd", "optimizer.lr=0.05", "checkpoint=none",
)  # fmt: skip


def job(*overrides: str, probe: bool = True, **of_the_probe: Any) -> dict[str, Any]:
    made = plain(*BASE, *overrides)
    if probe:
        made["model"] = {"name": Probe.name, "batch_norm": "shard", **of_the_probe}
    return made


@dataclass
class Outcome:
    record: Record
    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    machine: Machine | None = None

    @property
    def flat(self) -> Tensor:
        """Weights after every step, (steps, weights) float64."""
        return torch.tensor(self.record.weights, dtype=torch.float64)


def on_cpu(folder: Path, made: dict[str, Any]) -> Outcome:
    record = trained(folder, made=made)
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    kept = [{k: v for k, v in json.loads(line).items() if not k.startswith(("perf/", "time"))} for line in lines]
    return Outcome(record, kept, summary(folder))


def on_gpus(folder: Path, made: dict[str, Any], devices: int = 1, memory: int | None = None) -> Outcome:
    """The machine's syncs, launches and peaks are those of the run; no fault was found in it."""
    with pretend(devices, memory) as machine:
        found = on_cpu(folder, made)
    found.machine = machine
    assert not machine.faults, dict(machine.faults)
    return found


def apart(one: Outcome, other: Outcome) -> float:
    """Largest difference of any weight after any step, and of any logged number relative to its size."""
    assert one.flat.shape == other.flat.shape and len(one.rows) == len(other.rows)
    assert [sorted(i) for i in one.record.ids] == [sorted(i) for i in other.record.ids], "other samples"
    worst = (one.flat - other.flat).abs().max().item()
    for mine, theirs in zip(one.rows, other.rows, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            if isinstance(value, float):
                worst = max(worst, abs(value - theirs[key]) / max(1.0, abs(value)))
    return worst
