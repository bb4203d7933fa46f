"""What makes a step cheap changes nothing: indices of many windows at once, no questions between pauses, no range."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from isobatch.batch_plan import Batch, BatchPlan, Since
from isobatch.checkpoint import Checkpoint, Checkpointer
from isobatch.data import feed as feeds
from isobatch.data.feed import Feed
from isobatch.precision.scaling import update
from isobatch.runtime.distributed import Ranks
from isobatch.sampler import Computed, Shuffle
from isobatch.train.loop import Loop

PLANS = [
    (BatchPlan(Batch(24, 4, 1, 6, True), 203), range(1), 1),  # all shards of a window in one forward
    (BatchPlan(Batch(24, 5, 2, 2, True), 203), range(1, 2), 1),  # the second of two replicas, two forwards
    (BatchPlan(Batch(24, 4, 2, 2, True), 203, "pad"), range(2), 2),  # both in one process, a device for each
    (BatchPlan(Batch(24, 24, 1), 203, "drop"), range(1), 1),
    (BatchPlan(Batch(24, 2, 8, 1, True), 203), range(7, 8), 1),  # nothing of the last window is its own
    (BatchPlan(Batch(24, 4, 1, 4, True), 203, since=Since(9, 1, 50)), range(1), 1),
    (BatchPlan(Batch(300, 7, 1, 3, True), 203, "pad"), range(1), 1),
]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("sampler", [Shuffle(), Computed()])
@pytest.mark.parametrize(("plan", "replicas", "lanes"), PLANS)
def test_windows_that_are_cut_together_hold_what_each_holds_alone(plan: BatchPlan, replicas: range, lanes: int, sampler: Any,
                                                                  interleaved: bool) -> None:  # fmt: skip
    source = SimpleNamespace(reads_on=torch.device("cpu"))
    feed = Feed(source, plan, lambda epoch: sampler.order(epoch, 203, 5, list), replicas, lanes,  # type: ignore[arg-type]
                interleaved=interleaved)  # fmt: skip
    start = plan.since.step
    for first, stop in ((start, start + 40), (start + 3, start + 4), (start + 13, start + 31)):
        expected = []
        for step in range(first, stop):
            window = plan.window(step)
            for shards, layout in feed.filled(window):
                expected.append((window.epoch, layout.join([feed.shard_indices(window, shard) for shard in shards])))
        found = list(feed.requests(first, stop))
        assert len(found) == len(expected)
        assert all(request.epoch == epoch and request.indices.equal(indices)
                   for request, (epoch, indices) in zip(found, expected, strict=True))  # fmt: skip
    windows = [window for span in feed.spans(start, start + 40) for window in span]
    assert windows == [plan.window(step) for step in range(start, start + 40)]


def test_large_windows_are_not_cut_together() -> None:
    plan = BatchPlan(Batch(2**15, 2**15, 1), 2**20)
    feed = Feed(None, plan, lambda epoch: torch.arange(2**20), range(1), 1)  # type: ignore[arg-type]
    assert len(feed.span(0)) * 2**15 <= feeds.SPAN[1]
    assert len(Feed(None, BatchPlan(Batch(2**20, 2**20, 1), 2**20), torch.zeros, range(1), 1).span(0)) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [None, 4])
@pytest.mark.parametrize(("eval_every", "ahead"), [(5, 0), (7, -3), (3, 2), (10**9, 0)])
def test_no_pause_is_missed(eval_every: int, ahead: int, every: int | None, tmp_path: Path) -> None:
    saver = Checkpointer(Checkpoint(every=every), tmp_path, Ranks(), {})
    loop: Any = SimpleNamespace(total_steps=33, eval_every=eval_every, ahead=ahead, checkpointer=saver)
    for step in range(33):
        loop.state = SimpleNamespace(step=step)
        due = (n for n in range(step + 1, 34) if Loop._evaluates(loop, n) or saver.due(n))
        assert Loop._next_pause(loop) == next(due)


def test_an_update_without_the_profilers_range_is_the_same_and_forgets_nobody() -> None:
    def trained(step: Any, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> tuple[torch.Tensor, Any]:
        layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(layer.weight)
        made = optimizer(layer.parameters(), lr=0.1)  # type: ignore[call-arg]
        layer(torch.ones(1, 2)).sum().backward()
        step(made)
        return layer.weight.detach(), made

    def hooked(optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(lambda *given: called.append("own"))
        update(optimizer)

    def patched(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step = lambda: called.append("patched")  # type: ignore[method-assign,assignment]
        update(optimizer)

    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            called.append("mine")

    called: list[str] = []
    expected, _ = trained(lambda optimizer: optimizer.step())
    assert expected.equal(trained(update)[0]) and expected.equal(trained(hooked)[0])
    trained(patched)
    trained(update, Mine)
    everybodys = register_optimizer_step_pre_hook(lambda *given: called.append("everybody's"))
    trained(update)
    everybodys.remove()
    assert called == ["own", "patched", "mine", "everybody's"]
    with torch.autograd.profiler.profile(use_kineto=False) as seen:
        trained(update)
    assert any(event.key.startswith("Optimizer.step") for event in seen.key_averages())
