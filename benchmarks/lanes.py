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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from loop import RESNET, isobatch_loop

from isobatch.runtime.distributed import Ranks

DEFAULT = [*RESNET, "batch.effective=96", "batch.shard=16"]


class Compared(NamedTuple):
    """Of one shard at a time to several: median of the rounds' ratios and ratio of the best rounds by the clock; CPU time of
    several in that of one. `equal`: the weights after all rounds, to the bit."""

    ratio: float
    best: float
    cpu: float
    equal: bool


def compare(overrides: list[str], lanes: int, steps: int, rounds: int) -> Compared:
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
        made[lanes][0].parts.micro_step.close()
        pairs = list(zip(taken[1], taken[lanes], strict=True))
        return Compared(
            statistics.median(one[0] / several[0] for one, several in pairs),
            min(one[0] for one, _ in pairs) / min(several[0] for _, several in pairs),
            statistics.median(several[1] / one[1] for one, several in pairs), torch.equal(*weights),
        )  # fmt: skip


def rows(lanes: int = 2) -> Iterator[tuple[str, str, str]]:
    """(what, figure, compared with): windows of resnet18 at 64 px, shards of 16."""
    found = compare(DEFAULT, lanes, 2, 5)
    what = f"resnet18, 64 px, reduction=exact, {lanes} shards at a time"
    yield f"{what}: windows by the clock", f"{found.ratio:.2f} x", "one shard at a time (quiet cores alone tell)"
    yield f"{what}: CPU time", f"{found.cpu:.2f} x", "one shard at a time"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", default=DEFAULT)
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    found = compare(args.overrides, args.lanes, args.steps, args.rounds)
    bits = "equal" if found.equal else "DIFFER"
    print(f"{args.lanes} shards at a time: one at a time takes {found.ratio:.2f} x as long (best of each {found.best:.2f}); "
          f"CPU time {found.cpu:.2f} x; bits {bits}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
