"""Strategy x precision x reduction x features on pretended devices are one CPU's training, every pair at least once.

`make test` runs every feature on two devices, and every precision and reduction on one; `make test-all` the other pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import on_ranks
from harness import train as trained
from jobs import Outcome, apart, job, on_cpu, on_gpus
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
    "saving": ("checkpoint=default checkpoint.every=2", {}), "workers": ("data.num_workers=1", {}),
}  # fmt: skip
FACTORS = STRATEGIES, PRECISIONS, REDUCTIONS, FEATURES
Row = tuple[str, str, str, str]


def allowed(row: Row) -> bool:
    strategy, precision, reduction, feature = row
    return (strategy == "single" or reduction == "fast") and not (precision == "O3" and feature == "adamw")  # see optimizer


ALL = [row for row in product(*FACTORS) if allowed(row)]


def later(one: tuple[int, str], other: tuple[int, str]) -> bool:
    """Of two choices, (number of the factor, name): whether only `make test-all` is sure to run them together."""
    (factor, name), (second, other_name) = sorted((one, other))
    if factor == 0:
        return name != ("dp2" if second == 3 else "single") and (name, other_name) != ("dp3", "fp32")
    return True


def pairwise(rows: list[Row], but: Callable[..., bool] = lambda one, other: False) -> list[Row]:
    """Few of `rows`, such that every pair of choices that any row has is in one, but for what `but` leaves out."""

    def pairs(row: Row) -> set[Any]:
        return {(a, b) for a, b in combinations(enumerate(row), 2) if not but(a, b)}

    open_pairs, chosen = set().union(*map(pairs, rows)), []
    while open_pairs:
        best = max(rows, key=lambda row: len(pairs(row) & open_pairs))
        chosen.append(best)
        open_pairs -= pairs(best)
    return chosen


FEW = pairwise(ALL)
FAST = pairwise(ALL, later)


def test_every_pair_of_choices_is_run() -> None:
    assert len(FEW) < 110 and len(FAST) < 25
    for row in ALL:
        for (i, a), (k, b) in combinations(enumerate(row), 2):
            assert any(few[i] == a and few[k] == b for few in FEW)
            assert later((i, a), (k, b)) or any(few[i] == a and few[k] == b for few in FAST)


# its evaluation had inputs in half for an average in fp32
ALWAYS = [*FAST, ("dp2", "O3", "fast", "ema")]
ROWS = [pytest.param(row, marks=() if row in ALWAYS else pytest.mark.slow, id="-".join(row)) for row in ALL]


def words_of(precision: str, reduction: str, feature: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    words, more = FEATURES[feature]
    return (*PRECISIONS[precision].split(), *REDUCTIONS[reduction].split(), *words.split(), "steps=2", "eval_every=2"), more


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, str, str]], Outcome]:
    """(precision, reduction, feature) -> the training on one CPU."""

    @cache
    def made(cell: tuple[str, str, str]) -> Outcome:
        words, more = words_of(*cell)
        return on_cpu(tmp_path_factory.mktemp("alone"), job(*words, **more))

    return made


@pytest.mark.parametrize("row", ROWS)
def test_the_training_of_one_cpu(tmp_path: Path, row: Row, alone: Callable[[tuple[str, str, str]], Outcome]) -> None:
    strategy, precision, reduction, feature = row
    devices, parallel = STRATEGIES[strategy]
    words, more = words_of(precision, reduction, feature)
    one = alone((precision, reduction, feature))
    several = on_gpus(tmp_path / "gpu", job(*words, parallel, **more), devices)
    limit = 0.0 if strategy == "single" else 2e-6 if precision in ("fp32", "tf32") else 2e-2
    limit = max(limit, 5e-3 if feature == "adamw" and limit else 0.0)  # which divides rounding by its own size
    assert apart(one, several) <= limit


RANKS = {"fp32": "precision=fp32", "O2": "precision=O2", "ema_cpu": "ema=ema ema.decay=0.5 ema.device=cpu",
         "tree": "reduction=exact", "bin64": "reduction=exact reduction.method=bin64", "jsd": "loss=jsd"}  # fmt: skip


@pytest.mark.parametrize("names", [("O2", "tree"), pytest.param(("fp32", "ema_cpu", "bin64", "jsd"), marks=pytest.mark.slow)])
def test_two_ranks_are_one_device(tmp_path: Path, names: tuple[str, ...]) -> None:
    """ddp with gloo on two pretended devices; what DDP makes in C++ belongs to the first device that it meets."""
    kinds = {name: RANKS[name] for name in names}

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
