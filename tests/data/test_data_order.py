"""Reported faults of samplers and loaders (cases 10, 12, 13, 34): order, resume, random draws, left-over processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from isobatch.batch_plan import BatchPlan, resolve_batch
from isobatch.config import options
from isobatch.data.base import Split
from isobatch.data.device import ToDevice
from isobatch.data.feed import Feed
from isobatch.data.loader import WorkerSource
from isobatch.data.samples import Samples

ROOT = Path(__file__).parents[2]


class Probe:
    """Sample i is (a 64-bit NumPy draw, a torch draw), its target is i."""

    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = [int(numpy.random.randint(0, 2**63 - 1)), int(torch.randint(0, 2**62, ()))]
        return torch.tensor(drawn), index


def record(n: int, micro: int, world: int, accumulation: int, steps: range, workers: int = 0,
           shuffle: bool = True) -> list[list[tuple[list[int], list[list[int]]]]]:  # fmt: skip
    """For each step and rank: the ids, and the draws that came with them."""
    sampler = options("sampler", {"name": "shuffle" if shuffle else "sequential"})
    plan = BatchPlan(resolve_batch(None, micro, accumulation, world), n)
    found: list[list[Any]] = [[] for _ in steps]
    for rank in range(world):
        source = WorkerSource(Samples(Split(Probe(n)), 0), ToDevice(torch.device("cpu"), None, False), workers)
        feed = Feed(source, plan, lambda epoch: sampler.order(epoch, n, 0, None), range(rank, rank + 1), 1)
        try:
            for window, data in zip(found, feed.windows(steps.start, steps.stop), strict=True):
                batches = list(data.micro_batches)
                window.append(([int(i) for b in batches for i in b.targets], [d for b in batches for d in b.inputs.tolist()]))
        finally:
            source.close()
    return found


def ids(steps: list[list[Any]]) -> list[list[list[int]]]:
    return [[rank[0] for rank in step] for step in steps]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.case(10)
def test_each_epoch_has_an_order_of_its_own(workers: int, world: int) -> None:
    """Case 10."""
    per_epoch = 6 // world
    steps = ids(record(12, 2, world, 1, range(3 * per_epoch), workers))
    epochs = [steps[e * per_epoch : (e + 1) * per_epoch] for e in range(3)]
    for epoch in epochs:
        seen = [[i for step in epoch for i in step[rank]] for rank in range(world)]
        assert sorted(i for rank in seen for i in rank) == list(range(12))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert ids(record(12, 2, world, 1, range(3 * per_epoch), workers)) == steps, "a second run differs"


@pytest.mark.parametrize(("accumulation", "total", "stop"), [(1, 18, 8), (4, 6, 3)])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.case(12)
def test_a_resume_in_mid_epoch_repeats_and_loses_nothing(accumulation: int, total: int, stop: int, workers: int) -> None:
    """Case 12. The windows are a function of the step, so what is asked after the stop is what would have come."""
    whole = record(12, 2, 1, accumulation, range(total), workers)
    parts = record(12, 2, 1, accumulation, range(stop)) + record(12, 2, 1, accumulation, range(stop, total), workers)
    assert parts == whole
    second = ids(parts)[total // 3 : 2 * total // 3]
    assert sorted(i for (rank,) in second for i in rank) == list(range(12))


@pytest.mark.case(13)
def test_random_augmentation_is_random_and_repeatable() -> None:
    """Case 13."""
    steps = record(16, 1, 2, 1, range(16), workers=2)
    draws = [draw for step in steps for rank in step for draw in rank[1]]
    assert len(draws) == 32
    for column in (0, 1):
        assert len({draw[column] for draw in draws}) == 32, "workers, ranks or epochs share a draw"
    assert record(16, 1, 2, 1, range(16), workers=2) == steps
    alone = record(16, 1, 1, 2, range(16), workers=0)  # one process with accumulation
    assert [sorted(d for rank in step for d in rank[1]) for step in alone] == [
        sorted(d for rank in step for d in rank[1]) for step in steps
    ]


def processes_below(folder: Path) -> list[str]:
    """Command lines of processes whose working folder is `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if (entry / "cwd").resolve() == folder:
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return found


@pytest.mark.slow
@pytest.mark.case(34)
def test_workers_end_with_their_job_in_a_sweep_on_two_ranks(tmp_path: Path) -> None:
    """Case 34: evaluation in mid-epoch, two jobs, two ranks, two workers each for training and evaluation."""
    words = ["-m", "parallel=ddp", "parallel.nproc=2", "data.num_workers=2", "eval_every=2", "steps=5", "epochs=null",
             "seed=0,1", "model=mlp", "model.width=8", "logger=none", "data=synthetic", "data.samples=96",
             "data.eval_samples=24", "data.image_size=4", "augment=simple", "batch.effective=24"]  # fmt: skip
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *words], cwd=tmp_path, capture_output=True, text=True,
                          timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "can only test a child process" not in done.stderr and "Traceback" not in done.stderr
    assert len(list(tmp_path.glob("multirun/*/*/*/summary.json"))) == 2
    assert not processes_below(tmp_path.resolve())
