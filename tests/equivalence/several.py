"""Models whose samples would meet in a forward, and trainings of them with any number of shards in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import plain
from plans import ONE, Plan, Trace, traces
from torch import Tensor, nn
from torch.nn import functional

from isobatch import loss as losses
from isobatch import model as models
from isobatch.data import DataInfo
from isobatch.loss import CrossEntropy


class Drawing(nn.Module):
    """Batch norm, dropout and draws of its own, image by image and feature by feature."""

    def __init__(self, chans: int, classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(chans, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x + 0.1 * torch.randn_like(x)).mean((2, 3))
        keep = torch.rand(len(x), 1, dtype=x.dtype) < 0.8
        return self.head(functional.dropout(self.norm(x), 0.2, self.training) * keep)


def timm_model(arch: str, **options: Any) -> Callable[[int, int], nn.Module]:
    def make(chans: int, classes: int) -> nn.Module:
        import timm

        found: nn.Module = timm.create_model(arch, in_chans=chans, num_classes=classes, drop_rate=0.2, **options)
        return found

    return make


# no ReLU and no max pool in the deep one: where rounding puts one on its other side, the difference is of another size
MAKERS: dict[str, Callable[[int, int], nn.Module]] = {
    "own": Drawing,
    "resnet": timm_model("test_resnet", drop_path_rate=0.2, act_layer="silu", replace_stem_pool=True),
    "efficientnet": timm_model("test_efficientnet", drop_path_rate=0.2),
    "convnext": timm_model("test_convnext", drop_path_rate=0.2, patch_size=1),
    "vit": timm_model("test_vit", drop_path_rate=0.2, img_size=16, patch_size=8, attn_drop_rate=0.1),
}


class InDtype(nn.Module):
    def __init__(self, net: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.net, self.dtype = net.to(dtype), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.to(self.dtype))


@dataclass(frozen=True)
class Made:
    """As group `model`."""

    name: str = "shards_made"
    batch_norm: str = "shard"
    of: str = "own"
    wide: bool = True

    def build(self, info: DataInfo) -> nn.Module:
        return InDtype(MAKERS[self.of](info.in_chans, info.num_classes), torch.float64 if self.wide else torch.float32)


@dataclass(frozen=True)
class Probabilities(CrossEntropy):
    """Of targets that mixup has made, in the dtype of the output."""

    name: str = "shards_cross_entropy"

    def build(self) -> Any:
        return lambda output, targets: functional.cross_entropy(
            output, targets.to(output.dtype) if targets.is_floating_point() else targets)  # fmt: skip


models.TABLE[Made.name] = Made
losses.TABLE[Probabilities.name] = Probabilities

# 48 samples in six shards of 8; an epoch of 48 + tail. Small steps: larger ones make of every rounding a thousand in 50 steps
WORDS = ("logger=none", "threads=1", "data=synthetic", "data.eval_samples=8", "data.image_size=16", "data.in_chans=1",
         "batch.effective=48", "batch.shard=8", "log_every=1", "epochs=null", "checkpoint=none", "optimizer=sgd",
         "optimizer.lr=0.005", "scheduler=constant", "augment=simple", "augment.mixup=0.3", "augment.cutmix=0.5")  # fmt: skip
DP = Plan("dp2", ("parallel=dp", "parallel.replicas=2"))
PLANS = {plan.name: plan for plan in (ONE, DP, *(Plan(f"{name}{n}", (f"parallel={name}",), n)
                                                 for name, n in (("ddp", 2), ("ddp", 3), ("fsdp", 2))))}  # fmt: skip
MICRO = (8, 16, 24, 48)


def job(of: str, micro: int, *words: str, wide: bool = True, tail: int = 29, steps: int = 6) -> dict[str, Any]:
    made = plain(*WORDS, f"batch.micro={micro}", f"data.samples={48 + tail}", f"steps={steps}", f"eval_every={steps}", *words)
    made["model"] = {"name": Made.name, "of": of, "wide": wide}
    made["loss"] = {"name": Probabilities.name}
    return made


def losses_of(trace: Trace) -> list[float]:
    return [row["train/loss"] for row in trace.rows if "train/loss" in row]


def apart(one: Trace, other: list[Trace]) -> float:
    """Largest relative distance of weights, statistics and logged losses, of all ranks."""
    pairs = [(losses_of(one), losses_of(other[0]))]
    for rank in other:
        pairs += [(one.flat, rank.flat), (one.statistics, rank.statistics)]
    worst = 0.0
    for mine, theirs in pairs:
        a, b = torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
        assert a.shape == b.shape
        worst = max(worst, float((a - b).abs().max() / a.abs().max())) if len(a) else worst
    return worst


def distances(folder: Path, plan: Plan, jobs: dict[str, dict[str, Any]], expected: dict[str, Trace]) -> dict[str, float]:
    """Of each job on `plan` from the training of one shard a forward in one process, by the name's first word."""
    found = traces(folder, plan, jobs, limit_s=900)
    return {name: apart(expected[name.split()[0]], found[name]) for name in jobs}
