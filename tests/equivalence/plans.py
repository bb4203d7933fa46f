"""One training on many hardware plans: a model that tempts every shortcut, and all the bits that a run leaves behind."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import harness
import torch
from harness import on_ranks, plain
from torch import Tensor, nn

from isobatch import config as configuration
from isobatch import model as models
from isobatch.data import DataInfo
from isobatch.run import Run
from isobatch.runtime.distributed import Ranks
from isobatch.runtime.dtensor import whole, whole_tree
from isobatch.train.state import weights_sha256


@dataclass(frozen=True)
class Plan:
    name: str
    overrides: tuple[str, ...] = ()
    num_ranks: int = 1


ONE = Plan("one")
DP = tuple(Plan(f"dp{n}", ("parallel=dp", f"parallel.replicas={n}")) for n in (2, 3))
DDP = tuple(Plan(f"ddp{n}", ("parallel=ddp",), n) for n in (2, 3, 4, 5, 6, 7))  # 4 and 5 uneven, 7 with an idle rank
FSDP = Plan("fsdp4", ("parallel=fsdp",), 4), Plan("fsdp7", ("parallel=fsdp",), 7)


class Network(nn.Module):
    """Batch norm, dropout and stochastic depth; a branch that only some shards take, and one that none does."""

    def __init__(self, info: DataInfo, width: int = 8):
        super().__init__()
        from timm.layers import DropPath

        self.stem = nn.Sequential(nn.Conv2d(info.in_chans, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.path = DropPath(0.3)
        self.sometimes = nn.Linear(width, width)
        self.never = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, info.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x = (x + self.path(self.block(x))).mean((2, 3))
        if images.double().sum() > 0:
            x = x + self.sometimes(x).relu()
        return self.head(self.drop(x))


@dataclass(frozen=True)
class Probe:
    """As group `model`."""

    name: str = "equivalence_probe"
    batch_norm: str = "shard"
    width: int = 8

    def build(self, info: DataInfo) -> nn.Module:
        return Network(info, self.width)


class Plain(nn.Module):
    """Without batch norm and with every parameter in use."""

    def __init__(self, info: DataInfo, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(info.features, 16), nn.Tanh(), nn.Dropout(0.2),
                                    nn.Linear(16, info.num_classes)).to(dtype)  # fmt: skip
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images.to(self.dtype))


@dataclass(frozen=True)
class PlainProbe:
    name: str = "equivalence_plain"
    batch_norm: str = "shard"
    dtype = torch.float32

    def build(self, info: DataInfo) -> nn.Module:
        return Plain(info, self.dtype)


@dataclass(frozen=True)
class Float64Probe(PlainProbe):
    name: str = "equivalence_float64"
    dtype = torch.float64


@dataclass(frozen=True)
class InstanceNormProbe:
    """Its statistics can be taken from shards of one sample, and their mean is that of any larger shard."""

    name: str = "equivalence_instance_norm"
    batch_norm: str = "shard"

    def build(self, info: DataInfo) -> nn.Module:
        return nn.Sequential(nn.InstanceNorm2d(info.in_chans, track_running_stats=True), nn.Flatten(),
                             nn.Linear(info.features, info.num_classes))  # fmt: skip


for probe in (Probe, PlainProbe, Float64Probe, InstanceNormProbe):
    models.TABLE[probe.name] = probe

# 44 samples in six shards of 8 or 7; an epoch of 150 has a tail of 18, three samples a shard
BASE = (
    "logger=none", "threads=1", "data=synthetic", "data.samples=150", "data.eval_samples=40", "data.image_size=8",
    "data.in_chans=1", "batch.effective=44", "batch.micro=8", "ema=ema", "ema.decay=0.9", "log_every=1", "epochs=null",
    "checkpoint=none",
)  # fmt: skip
PRECISIONS = {
    "fp32": ("precision=fp32",),
    "bf16": ("precision=amp", "precision.dtype=bfloat16"),
    "fp16": ("precision=amp", "precision.dtype=float16", "precision.loss_scale=2097152"),  # overflows: some steps are skipped
}
OPTIMIZERS = {
    "sgd": ("optimizer=sgd", "optimizer.lr=0.05"),
    "adamw": ("optimizer=adamw", "optimizer.lr=0.003", "max_grad_norm=0.5"),
}


def job(*overrides: str, probe: bool = True) -> dict[str, Any]:
    """A config on no particular plan; `probe`: of the model above."""
    made = plain(*BASE, *overrides)
    if probe:
        made["model"] = {"name": Probe.name}
    return made


@cache
def parallel_of(plan: Plan) -> dict[str, Any]:
    return plain(*plan.overrides)["parallel"]


def on_plan(made: dict[str, Any], plan: Plan) -> dict[str, Any]:
    return {**made, "parallel": parallel_of(plan)}


@dataclass
class Trace:
    """All that has to be the same: hashes of weights (with buffers), EMA and optimizer state, and every logged number."""

    weights: str
    ema: str
    optimizer: str
    rows: list[dict[str, Any]]
    skipped: int
    reruns: int
    flat: list[float]
    statistics: list[float]


def tree_hash(value: Any) -> str:
    """Of nested containers of tensors and numbers."""
    digest = hashlib.sha256()

    def feed(item: Any) -> None:
        if isinstance(item, Tensor):
            digest.update(str(item.dtype).encode() + item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key in sorted(item, key=str):
                feed(str(key)), feed(item[key])
        elif isinstance(item, list | tuple):
            for each in item:
                feed(each)
        else:
            digest.update(repr(item).encode())

    feed(value)
    return digest.hexdigest()


def trace(made: dict[str, Any], folder: Path, ranks: Ranks) -> Trace:
    """Train in this process as one of `ranks`."""
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(configuration.load(made), folder, ranks)
    run.build()
    run.perform()
    run.finish("completed", None)
    assert run.loop is not None
    state = run.loop.state
    units = getattr(state.reducer, "units", None)
    lines = (folder / "metrics.jsonl").read_text().splitlines() if ranks.is_main else []
    kept = [{k: v for k, v in json.loads(line).items() if not k.startswith(("perf/", "time"))} for line in lines]
    return Trace(
        weights_sha256(state.model), "" if state.ema is None else weights_sha256(state.ema.module),
        tree_hash(whole_tree(state.optimizer.state_dict()["state"], True)), kept, state.skipped_steps,
        units.reruns if units else 0,
        torch.cat([whole(p).detach().reshape(-1).double() for p in state.parameters]).tolist(),
        [v for b in state.model.buffers() for v in b.detach().double().reshape(-1).tolist()],
    )  # fmt: skip


def traces(folder: Path, plan: Plan, jobs: dict[str, dict[str, Any]], limit_s: float = 200) -> dict[str, list[Trace]]:
    """Every job on one plan, in one set of processes: name -> trace of each rank.

    One process is this one: what it imports on the way, the ranks that are forked later need not import again.
    """

    planned = {name: on_plan(made, plan) for name, made in jobs.items()}

    def work(ranks: Ranks) -> dict[str, Trace]:
        return {name: trace(made, folder / plan.name / name, ranks) for name, made in planned.items()}

    before, harness.TIME_LIMIT_S = harness.TIME_LIMIT_S, limit_s
    try:
        if plan.num_ranks == 1:
            return {name: [found] for name, found in work(Ranks()).items()}
        results = on_ranks(plan.num_ranks, folder / plan.name, work)
    finally:
        harness.TIME_LIMIT_S = before
    return {name: [result[name] for result in results] for name in jobs}


def differences(one: Trace, other: list[Trace]) -> list[str]:
    """What tells a plan's trace from that of one process; [] = the same to the bit."""
    found = []
    for rank, mine in enumerate(other):
        for part in ("weights", "ema", "optimizer", "skipped", "reruns"):
            if getattr(mine, part) != getattr(one, part):
                found.append(f"rank {rank}: {part}")
    for ours, theirs in zip(one.rows, other[0].rows, strict=True):
        for key in ours:
            if repr(ours[key]) != repr(theirs.get(key)):
                found.append(f"step {ours.get('step')}: {key} {ours[key]} {theirs.get(key)}")
    return found
