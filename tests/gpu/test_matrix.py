"""Strategy x precision x reduction x features on pretended devices are one CPU's training, every pair at least once.

`make test` leaves what a feature meets but strategies, a precision or a reduction, to `make test-all`.
"""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import on_ranks
from harness import train as trained
from jobs import apart, job, on_cpu, on_gpus
from pretended import pretend

from isobatch.runtime.distributed import Ranks

pytestmark = pytest.mark.gpu_pretended

STRATEGIES = {"single": (1, "parallel=single"), "dp2": (2, "parallel=dp"), "dp3": (3, "parallel=dp")}
PRECISIONS = {"fp32": "precision=fp32", "bf16": "precision=bf16", "amp": "precision=amp precision.dtype=float16",
              "O2": "precision=O2", "O3": "precision=O3",
              "tf32": "precision=tf32", "bf16_pure": "precision=bf16_pure"}  # fmt: skip
REDUCTIONS = {"fast": "reduction=fast", "tree": "reduction=exact", "bin64": "reduction=exact reduction.method=bin64"}
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("", {}), "ema": ("ema=ema ema.decay=0.5", {}), "ema_cpu": ("ema=ema ema.decay=0.5 ema.device=cpu", {}),
    "clip": ("max_grad_norm=0.5", {}), "mixup": ("augment=mixup", {}), "jsd": ("loss=jsd", {}),
    "distill": ("loss=distill loss.teacher.arch=resnet10t", {}), "freeze": ("", {"freeze": ("stem",)}),
    "checkpointing": ("", {"grad_checkpointing": True}), "adamw": ("optimizer=adamw optimizer.lr=0.002", {}),
    "saving": ("checkpoint=default checkpoint.every=2", {}),
}  # fmt: skip
FACTORS = STRATEGIES, PRECISIONS, REDUCTIONS, FEATURES
Row = tuple[str, str, str, str]


def allowed(row: Row) -> bool:
    strategy, precision, reduction, feature = row
    return (strategy == "single" or reduction == "fast") and not (precision == "O3" and feature == "adamw")  # see optimizer


ALL = [row for row in product(*FACTORS) if allowed(row)]


LATER = {1, 3}, {2, 3}  # pairs of factors: a feature with a precision or a reduction


def pairwise(rows: list[Row], but: tuple[set[int], ...] = ()) -> list[Row]:
    """Few of `rows`, such that every pair of choices that any row has is in one of them, but for pairs of factors in `but`."""

    def pairs(row: Row) -> set[Any]:
        return {(a, b) for a, b in combinations(enumerate(row), 2) if {a[0], b[0]} not in but}

    open_pairs, chosen = set().union(*map(pairs, rows)), []
    while open_pairs:
        best = max(rows, key=lambda row: len(pairs(row) & open_pairs))
        chosen.append(best)
        open_pairs -= pairs(best)
    return chosen


FEW = pairwise(ALL)
FAST = pairwise(ALL, LATER)


def test_every_pair_of_choices_is_run() -> None:
    assert len(FEW) < 110 and len(FAST) < 45
    for row in ALL:
        for (i, a), (k, b) in combinations(enumerate(row), 2):
            assert any(few[i] == a and few[k] == b for few in FEW)
            assert {i, k} in LATER or any(few[i] == a and few[k] == b for few in FAST)


ROWS = [pytest.param(row, marks=() if row in FAST else pytest.mark.slow, id="-".join(row)) for row in ALL]


@pytest.mark.parametrize("row", ROWS)
def test_the_training_of_one_cpu(tmp_path: Path, row: Row) -> None:
    strategy, precision, reduction, feature = row
    devices, parallel = STRATEGIES[strategy]
    words, more = FEATURES[feature]
    words = *PRECISIONS[precision].split(), *REDUCTIONS[reduction].split(), *words.split(), "steps=3", "eval_every=3"
    one = on_cpu(tmp_path / "cpu", job(*words, **more))
    several = on_gpus(tmp_path / "gpu", job(*words, parallel, **more), devices)
    limit = 0.0 if strategy == "single" else 2e-6 if precision in ("fp32", "tf32") else 2e-2
    limit = max(limit, 5e-3 if feature == "adamw" and limit else 0.0)  # which divides rounding by its own size
    assert apart(one, several) <= limit


def test_two_ranks_are_one_device(tmp_path: Path) -> None:
    """ddp with gloo on two pretended devices; what DDP makes in C++ belongs to the first device that it meets."""
    kinds = {"fp32": "precision=fp32", "O2": "precision=O2", "ema_cpu": "ema=ema ema.decay=0.5 ema.device=cpu",
             "tree": "reduction=exact", "bin64": "reduction=exact reduction.method=bin64", "jsd": "loss=jsd"}  # fmt: skip

    def work(ranks: Ranks) -> dict[str, Any]:
        found = {}
        for name, words in kinds.items():
            with pretend(2) as machine:
                found[name] = trained(tmp_path / name, made=job(*words.split(), "parallel=ddp"), ranks=ranks).weights
            found[name + " peaks"] = [machine.peak[i] > 0 for i in range(2)]
        return found

    both = on_ranks(2, tmp_path / "ranks", work)
    for name, words in kinds.items():
        one = torch.tensor(on_cpu(tmp_path / f"{name}-one", job(*words.split())).record.weights)
        for rank, found in enumerate(both):
            far = (torch.tensor(found[name]) - one).abs().max().item()
            assert far <= (0.0 if name in ("tree", "bin64") else 5e-3 if name == "O2" else 2e-6), (name, rank, far)
            assert found[name + " peaks"] == [rank == 0, rank == 1]
