"""`reduction=exact` on a CPU: windows of one shard at a time against several at a time, and whether the bits are equal.

    python benchmarks/lanes.py                       # resnet18 at 64 px, shards of 16, two lanes
    python benchmarks/lanes.py --steps 20 batch.shard=8   # the default network on digits

Rounds of whole windows (forward, backward, sum, update) alternate between two trainings in one process. Told are the median of
the rounds' ratios and the ratio of the best ones by the clock, which need quiet cores, and the ratio of the CPU time of the
process, which says what lanes cost.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from loop import RESNET, isobatch_loop

from isobatch.runtime.distributed import Ranks

DEFAULT = [*RESNET, "batch.effective=96", "batch.shard=16"]


def compare(overrides: list[str], lanes: int, steps: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = {}
        for count in (1, lanes):
            words = [*overrides, "reduction=exact", f"threads={count}", "accumulation=1"]
            loop, advance = isobatch_loop(words, Ranks(), Path(folder) / str(count))
            loop.audit = None
            made[count] = loop, advance
        taken: dict[int, list[tuple[float, float]]] = {1: [], lanes: []}
        for round_ in range(rounds + 1):
            for count, (_, advance) in made.items():
                wall, cpu = time.perf_counter(), time.process_time()
                advance(steps)
                if round_:  # the first round warms up
                    taken[count].append((time.perf_counter() - wall, time.process_time() - cpu))
        weights = [torch.cat([p.detach().reshape(-1) for p in loop.state.parameters]) for loop, _ in made.values()]
        pairs = list(zip(taken[1], taken[lanes], strict=True))
        ratios = [one[0] / several[0] for one, several in pairs]
        best = min(one[0] for one, _ in pairs) / min(several[0] for _, several in pairs)
        cpu = statistics.median(several[1] / one[1] for one, several in pairs)
        bits = "equal" if torch.equal(*weights) else "DIFFER"
        print(f"{lanes} shards at a time: one at a time takes {statistics.median(ratios):.2f} x as long (best of each "
              f"{best:.2f}); CPU time {cpu:.2f} x; bits {bits}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", default=DEFAULT)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    compare(args.overrides, args.lanes, args.steps, args.rounds)


if __name__ == "__main__":
    main()
