"""Running statistics of batch norm are on their way while the last backward runs, on ranks without a shard too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "equivalence"))

from harness import on_ranks
from plans import InstanceNormProbe, job, trace

from isobatch.reduction import exact, fast, tree
from isobatch.runtime.distributed import Ranks

# two shards a window. Batch norm has them on two of three ranks; instance norm can do with one sample, so the second window
# of an epoch, of one sample, leaves one of two ranks without any when DDP lays out its buckets anew
SMALL = ("batch.shard=4", "batch.micro=4", "batch.effective=8", "steps=4", "eval_every=4", "optimizer=sgd", "optimizer.lr=0.05")
CASES = {"batch_norm": (3, ("data.samples=16",)), "instance_norm": (2, ("data.samples=9",))}


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("norm", CASES)
def test_they_are_sent_before_the_last_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: str,
                                                reduction: str) -> None:  # fmt: skip
    world_size, words = CASES[norm]
    made = job(*SMALL, *words, f"reduction={reduction}")
    if norm == "instance_norm":
        made["model"] = {"name": InstanceNormProbe.name}
    alone = trace(made, tmp_path / "alone", Ranks())
    events: list[str] = []
    sizes = [0]
    kind: Any = fast.FastReducer if reduction == "fast" else exact.ExactReducer
    begin, leave, mean, idle = kind.begin, kind.add_buffers, kind.mean_buffers, kind.finish
    later, owners, now = Ranks.all_reduce_later, tree.to_owners, Ranks.all_reduce

    def begun(self: Any, window: Any, statistics: Any) -> None:
        events.append("window")
        sizes.append(statistics.numel())
        if not hasattr(self, "seen"):
            self.seen = [p.register_post_accumulate_grad_hook(lambda p: events.append("gradient"))
                         for p in self.module.parameters()]  # fmt: skip
        begin(self, window, statistics)

    def noted(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return original(*args, **kwargs)

        return call

    def blocking(self: Ranks, tensor: Any, op: str = "sum") -> Any:
        if tensor.numel() == sizes[-1] and reduction == "fast":
            events.append("now")
        return now(self, tensor, op)

    monkeypatch.setattr(kind, "begin", begun)
    monkeypatch.setattr(kind, "add_buffers", noted("forward", leave))
    monkeypatch.setattr(kind, "finish", noted("finish", idle))
    monkeypatch.setattr(kind, "mean_buffers", noted("mean", mean))
    monkeypatch.setattr(Ranks, "all_reduce_later", noted("sent", later))
    monkeypatch.setattr(tree, "to_owners", noted("sent", owners))
    monkeypatch.setattr(Ranks, "all_reduce", blocking)

    def work(ranks: Ranks) -> Any:
        events.clear()
        return trace({**made, "parallel": job("parallel=ddp")["parallel"]}, tmp_path / "run", ranks), list(events)

    for rank, (run, seen) in enumerate(on_ranks(world_size, tmp_path / "ranks", work)):
        assert run.statistics == pytest.approx(alone.statistics, rel=0 if reduction == "exact" else 1e-6)
        assert run.flat == pytest.approx(alone.flat, rel=0 if reduction == "exact" else 1e-4, abs=1e-7)
        windows = " ".join(seen).split("window")[1:]
        assert len(windows) == 4
        for number, window in enumerate(windows):
            told = window.split()
            has_shard = rank < (1 if norm == "instance_norm" and number % 2 else 2)
            assert told[:2] == (["forward", "sent"] if has_shard else ["finish", "sent"]), (rank, number, told)
            assert "gradient" in told[2:] or not has_shard
            assert "now" not in told and "mean" in told  # nothing was left to be sent
