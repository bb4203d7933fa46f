"""What one audit of `audit=replay` costs, in windows: a training that audits every step against the same one that audits none.

    python benchmarks/audit.py           # toy MLP; resnet18 at 64 px with one shard a rank, and with three
    python benchmarks/audit.py toy

Rounds alternate between both in one process; given are medians of the CPU time of the process, which other work on the machine
disturbs least. One process audits itself, so it computes one shard more in each window: a part of the window that accumulation
makes smaller. With `audit.every=100` a run pays a hundredth of it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from loop import RESNET, TOY, isobatch_loop

from isobatch.audit import ReplayAudit
from isobatch.runtime.distributed import Ranks

CASES = {
    "toy": (TOY, 300, 15),
    "resnet18 x 1": ([*RESNET, "batch.effective=16", "batch.shard=16"], 3, 7),
    "resnet18 x 3": ([*RESNET, "batch.effective=48", "batch.shard=16"], 2, 7),
}


def cost(overrides: list[str], steps: int, rounds: int) -> float:
    """Windows that an audit of one takes."""
    with tempfile.TemporaryDirectory() as folder:
        loop, advance = isobatch_loop([*overrides, "reduction=exact"], Ranks(), Path(folder))
        loop.feed.source.batches_ = loop.feed.source.batches_[:1]  # the same one for whoever asks
        audit = ReplayAudit(every=1).build(loop, [torch.default_generator], lambda: "")
        found = []
        for round_ in range(rounds + 1):
            taken = []
            for on in (False, True):
                loop.audit = audit if on else None
                loop.parts.reducer.observer = None
                start = time.process_time()
                advance(steps)
                taken.append(time.process_time() - start)
            if round_:  # the first round warms up
                found.append(taken[1] / taken[0] - 1)
        return statistics.median(found)


def main(which: list[str]) -> None:
    torch.set_num_threads(1)
    for name, case in CASES.items():
        if not which or name.split()[0] in which:
            print(f"{name:14s} {cost(*case):.2f} windows an audit", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
