"""What a window sends with weights in parts: the planner's numbers worked out by hand, and beside what torch really calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import on_ranks, plain, train
from precision_probes import model_of
from torch import Tensor, nn

from isobatch.batch_plan import Batch
from isobatch.config import load
from isobatch.parallel.wire import Ring, WeightsInParts, WholeGradients
from isobatch.planner import cost
from isobatch.runtime.distributed import Ranks
from isobatch.train import loop

GB = 10**9
NETWORK = cost.CostOptions(bandwidth_gb_s=2.0, latency_us=50.0)
MEASURED = cost.Measured(samples=8, forward_s=0.1, backward_s=0.3)


def update_s(wire: Any, replicas: int = 4) -> float:
    """Two micro steps of eight samples on four replicas."""
    return cost.row(Batch(64, 8, 4), replicas, MEASURED, wire, NETWORK).update_ms / 1e3


def test_a_window_of_parts_worked_out_by_hand() -> None:
    # 4 replicas: 3 messages of a quarter. 1 GB in 5 pieces at 2 GB/s: 3 (0.125 + 5 x 50 us); 0.8 GB in 4: 3 (0.1 + 4 x 50 us)
    gather, again = 0.37575, 0.3006
    reduce = gather
    wire = WeightsInParts(GB, GB, 5, 8 * GB // 10, 4)
    first, last = wire.window(4, 2)
    assert first == last and first.forward == (Ring(GB, 4, 5),)
    assert cost.seconds(NETWORK, first.forward) == pytest.approx(gather)
    assert cost.seconds(NETWORK, first.backward) == pytest.approx(again + reduce)
    row = cost.row(Batch(64, 8, 4), 4, MEASURED, wire, NETWORK)
    assert row.network_ms == pytest.approx(2e3 * (gather + again + reduce)) == pytest.approx(row.update_ms)  # nothing is hidden
    # eight micro steps on one replica's worth each, four times the samples: 1.0521 s instead of 0.4 s
    assert row.grown == pytest.approx(0.4 / 1.0521) and row.efficiency == pytest.approx(3.2 / (4 * 2.1042))
    # gradients once a window: the first backward sends 0.3006 s, of which it hides 0.3
    assert update_s(WeightsInParts(GB, GB, 5, 8 * GB // 10, 4, every_reduce=False)) == pytest.approx(
        2 * gather + 2 * again + reduce
    )
    # not again for the backward: it takes what is larger, its own 0.3 s or the 0.37575 s of the gradients
    assert update_s(WeightsInParts(GB, GB, 5)) == pytest.approx(2 * gather + 2 * reduce)
    # whole over the window: gathered beside the first forward, reduced beside the last backward
    kept = WeightsInParts(GB, GB, 5, every_gather=False, every_reduce=False)
    assert update_s(kept) == pytest.approx(gather + 0.3 + 0.1 + reduce)
    sent = [sum((r.ranks - 1) * r.nbytes / r.ranks for e in w.window(4, 2) for rings in e for r in rings)
            for w in (kept, WholeGradients(GB))]  # fmt: skip
    assert sent[0] == sent[1], "as much as DDP"
    assert update_s(wire, 1) == pytest.approx(3.2)


def test_copies_of_parts_worked_out_by_hand() -> None:
    wire = WeightsInParts(GB, GB, 5, shard_size=2)
    (exchange,) = wire.window(4, 1)
    # two parts: one message of 0.5 GB (0.25 s); then half of the gradients over two copies: twice one message of 0.25 GB
    assert cost.seconds(NETWORK, exchange.forward) == pytest.approx(0.25 + 5 * 50e-6)
    assert cost.seconds(NETWORK, exchange.backward) == pytest.approx(0.25 + 5 * 50e-6 + 2 * (0.125 + 5 * 50e-6))
    assert wire.window(3, 1)[0].forward == (Ring(GB, 3, 5),) and wire.window(2, 1) == WeightsInParts(GB, GB, 5).window(2, 1)


class Net(nn.Module):
    """(N, 2, 8, 8) -> (N, 10); two blocks with batch norm, and a classifier that is in no block. Two ranks share all evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)) for _ in range(2)))
        self.head = nn.Linear(2 * 64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(images).flatten(1))


SHORT = ("logger=none", "threads=1", "data=synthetic", "data.samples=16", "data.eval_samples=4", "data.image_size=8",
         "data.in_chans=2", "epochs=null", "steps=1", "batch.effective=16", "batch.micro=4",
         "batch.shard=null", "optimizer=sgd",
         "checkpoint=none", "parallel=fsdp", "parallel.blocks=[blocks.*]")  # fmt: skip
KEPT = ("parallel.reshard_after_forward=false", "parallel.reshard_between_micro_steps=false")
CHOICES = {
    "default": (),
    "once": ("parallel.reduce_between_micro_steps=false", "parallel.reshard_after_forward=false"),
    "kept": (*KEPT, "parallel.reduce_between_micro_steps=false"),
    "half": ("precision=bf16_pure",),
}


def test_torch_gathers_and_reduces_as_often_as_the_plan_says(tmp_path: Path) -> None:
    short = (*SHORT, *model_of("two_blocks", lambda info: Net()))

    def work(ranks: Ranks) -> dict[str, tuple[list[int], list[int]]]:
        """Name -> of one window's all-gathers and reduce-scatters the bytes of the whole, in order."""
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

        sent: tuple[list[int], list[int]] = [], []
        for which, kind in enumerate((collectives.DefaultAllGather, collectives.DefaultReduceScatter)):

            def noted(self: Any, output: Tensor | None = None, given: Tensor | None = None, *, which: int = which,
                      call: Any = kind.__call__, **more: Any) -> Any:  # fmt: skip
                output, given = more.get("output_tensor", output), more.get("input_tensor", given)
                sent[which].append((output, given)[which].nbytes)
                return call(self, **{"output_tensor": output, "input_tensor": given, **more})

            kind.__call__ = noted  # of this rank, which ends with the work
        found, step = {}, loop.train_step

        def counted(*args: Any) -> Any:
            for each in sent:
                each.clear()
            result = step(*args)
            found[name] = [*sent[0]], [*sent[1]]
            return result

        loop.train_step = counted
        for name, words in CHOICES.items():
            train(tmp_path / name, *short, *words, ranks=ranks)
        return found

    found = on_ranks(2, tmp_path / "ranks", work)
    for name, words in CHOICES.items():
        config = load(plain(*short, *words))
        wire = config.parallel.wire(Net(), config.precision, 0)
        window = wire.window(2, 2)
        reduces = [e.backward[-1] for e in window[0 if wire.every_reduce else -1 :]]
        gathers = [ring for e in window for rings in e for ring in rings]
        for ring in reduces:
            gathers.remove(ring)
        planned = [(sum(r.nbytes for r in rings), sum(r.pieces for r in rings)) for rings in (gathers, reduces)]
        for sent in found:
            assert [(sum(each), len(each)) for each in sent[name]] == planned, name
