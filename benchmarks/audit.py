"""What one audit of `audit=replay` costs, in windows: a training that audits every step against the same one that audits none.

    python benchmarks/audit.py           # a toy MLP; resnet18 at 64 px with 1, 3 and 6 shards a rank and window; two ranks
    python benchmarks/audit.py toy

Rounds alternate between both in one process; given are medians of the CPU time of a process, which other work on the machine
disturbs least. Everybody computes one shard more in an audited window: a part of it that accumulation makes smaller. Two ranks
also digest what they hold; one process has nobody to compare that with. With `audit.every=100` a run pays a hundredth of it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from loop import RESNET, TOY, isobatch_loop, on_ranks, quiet

from isobatch.audit import ReplayAudit
from isobatch.launch.withdrawal import LaunchNode
from isobatch.runtime.distributed import Ranks

SHARDS = [*RESNET, "batch.shard=16"]
TWO = ["parallel=ddp"]
CASES = {  # name -> overrides, ranks, steps of a round, rounds
    "toy, 1 process": (TOY, 1, 300, 15),
    "toy, 2 ranks": ([*TOY, *TWO, "batch.effective=64", "batch.shard=32"], 2, 200, 9),
    "resnet18, 1 shard": ([*SHARDS, "batch.effective=16"], 1, 3, 7),
    "resnet18, 3 shards": ([*SHARDS, "batch.effective=48"], 1, 2, 7),
    "resnet18, 6 shards": ([*SHARDS, "batch.effective=96"], 1, 1, 7),
    "resnet18, 1 shard each of 2 ranks": ([*SHARDS, *TWO, "batch.effective=32"], 2, 3, 5),
    "resnet18, 3 shards each of 2 ranks": ([*SHARDS, *TWO, "batch.effective=96"], 2, 2, 5),
    "resnet18, 3 shards each, AdamW": ([*SHARDS, *TWO, "batch.effective=96", "optimizer=adamw"], 2, 2, 5),
}


def cost(overrides: list[str], steps: int, rounds: int, ranks: Ranks) -> float:
    """Windows that an audit of one takes."""
    with tempfile.TemporaryDirectory() as folder:
        loop, advance = isobatch_loop([*overrides, "reduction=exact"], ranks, Path(folder))
        loop.feed.source.batches_ = ranks.broadcast_object(loop.feed.source.batches_[:1])  # the same one for whoever asks
        audit = ReplayAudit(every=1).build(loop, [torch.default_generator], LaunchNode())
        found = []
        for round_ in range(rounds + 1):
            taken = {}
            for on in (False, True) if round_ % 2 else (True, False):
                loop.audit = audit if on else None
                loop.parts.reducer.observer = None
                ranks.agree(0)  # all begin together
                start = time.process_time()
                advance(steps)
                taken[on] = time.process_time() - start
            if round_:  # the first round warms up
                found.append(taken[True] / taken[False] - 1)
        return statistics.median(found)


def main(which: list[str]) -> None:
    torch.set_num_threads(1)
    for name, (overrides, num_ranks, steps, rounds) in CASES.items():
        if which and name.split(",")[0] not in which:
            continue
        with quiet():
            found = (
                on_ranks(num_ranks, cost, overrides, steps, rounds)
                if num_ranks > 1
                else cost(overrides, steps, rounds, Ranks())
            )
        print(f"{name:36s} {found:.2f} windows an audit, {found:.2f} % of a run with audit.every=100", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
