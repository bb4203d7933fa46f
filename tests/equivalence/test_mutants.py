"""The checks of this folder can fail: each broken rule turns the check that guards it red."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import mean_probe, train
from plans import DDP, ONE, differences, job, traces

from isobatch.data import feed
from isobatch.reduction import exact
from isobatch.runtime import randomness
from isobatch.train import batch_norm

EXACT = ("reduction=exact", "optimizer=sgd", "optimizer.lr=0.05", "steps=3", "eval_every=3")


def plans_agree(folder: Path) -> None:
    """One process and four uneven ranks leave the same bits."""
    made = {"all": job(*EXACT)}
    expected = traces(folder / "one", ONE, made)["all"][0]
    found = differences(expected, traces(folder / "ddp", DDP[2], made)["all"])
    assert found == []


def windows_weigh_their_samples(folder: Path) -> None:
    """The probe's one weight is the mean target of the window after a step: 7 samples in shards of 3, 2 and 2."""
    record = train(folder, *mean_probe([float(i * i) for i in range(1, 8)]), "batch.effective=null", "batch.micro=3",
                   "batch.shard=null",
                   "accumulation=3", "reduction=exact")  # fmt: skip
    assert record.last == pytest.approx([20.0], abs=1e-4)


def statistics_count_filled_shards(folder: Path) -> None:
    """Two samples in shards of one: the statistics are those of one shard with both, although four shards stay empty."""
    for reduction in ("exact", "fast"):
        found = []
        for micro in (6, 1):
            made = job(*EXACT[1:], f"reduction={reduction}", "data.samples=2", "batch.effective=6", f"batch.micro={micro}",
                       "batch.shard=null")  # fmt: skip
            made["model"] = {"name": "equivalence_instance_norm"}
            found.append(torch.tensor(traces(folder / f"{reduction}{micro}", ONE, {"all": made})["all"][0].statistics))
        assert torch.allclose(*found, rtol=1e-5, atol=1e-7)


CHECKS = (plans_agree, windows_weigh_their_samples, statistics_count_filled_shards)


# that plans agree is what the rest of this folder asks
@pytest.mark.parametrize("check", [pytest.param(plans_agree, marks=pytest.mark.slow), *CHECKS[1:]])
def test_the_rules_as_they_are_pass(tmp_path: Path, check: Callable[[Path], None]) -> None:
    check(tmp_path)


def drop_the_weight(patch: pytest.MonkeyPatch) -> None:
    original = feed.MicroBatch

    def unweighted(shards: Any, sizes: Any, inputs: Any, targets: Any, weight: float, *rest: Any) -> Any:
        return original(shards, sizes, inputs, targets, len(shards) / 3, *rest)

    patch.setattr(feed, "MicroBatch", unweighted)


def count_skipped_shards(patch: pytest.MonkeyPatch) -> None:
    original = exact.ExactReducer.mean_buffers

    def over_all(self: Any) -> Any:
        return original(self) * self.window.num_filled / self.window.num_shards

    patch.setattr(exact.ExactReducer, "mean_buffers", over_all)


def seed_by_rank(patch: pytest.MonkeyPatch) -> None:
    original = randomness.ShardSeeder.__call__

    def by_rank(self: Any, step: int, shards: tuple[int, ...]) -> None:
        ranked = torch.distributed.is_initialized() and torch.distributed.get_rank()
        original(self, step, tuple(int(ranked) for _ in shards))

    patch.setattr(randomness.ShardSeeder, "__call__", by_rank)


def start_batch_norm_from_the_previous_shard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch_norm.ShardStatistics, "enter", lambda self: None)


def average_means(patch: pytest.MonkeyPatch) -> None:
    def mean_of_rank_means(self: Any) -> torch.Tensor:
        mine = self.losses[self.losses != 0].mean()
        return self.ranks.all_reduce(mine) / self.ranks.world_size * self.window.num_filled

    patch.setattr(exact.ExactReducer, "window_loss", mean_of_rank_means)


def add_in_a_chain(patch: pytest.MonkeyPatch) -> None:
    """A plain fp32 sum per rank, then over ranks in their order."""

    def build(options: Any, working: Any, strategy: Any, plan: Any, ranks: Any, device: Any) -> Any:
        class Chain(exact.ExactReducer):
            def finish(self) -> bool:
                for p in self.parameters:
                    gradient = torch.zeros_like(p) if p.grad is None else p.grad
                    p.grad = self.ranks.all_reduce(gradient)
                return True

            def _take(self, b: int) -> None:
                pass

        return Chain(options, working, strategy, plan, ranks, device)

    patch.setattr(exact, "build", build)


@pytest.mark.parametrize(("mutant", "check"), [
    (drop_the_weight, windows_weigh_their_samples),
    (count_skipped_shards, statistics_count_filled_shards),
    (seed_by_rank, plans_agree),
    (average_means, plans_agree),
    *(pytest.param(mutant, plans_agree, marks=pytest.mark.slow)
      for mutant in (start_batch_norm_from_the_previous_shard, add_in_a_chain)),
])  # fmt: skip
def test_a_broken_rule_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant, check) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check(tmp_path)
