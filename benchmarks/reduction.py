"""What reduction=exact costs: tree, bin64 and fast against torch's DDP by hand, in one interleaved run.

    python benchmarks/reduction.py            # resnet18 at 64 and 224 px on two ranks, then at 64 px in one process
    python benchmarks/reduction.py 64 7       # one size, with this many rounds

Rounds alternate between all of them in the same processes, so that a machine that speeds up or slows down does so for all.
Given are medians over the rounds of ratios to the hand-written loop (loop.py: DDP with gradients as bucket views, `no_sync`
while it accumulates, a micro batch that is a shard): time and CPU time of a window (the slower rank's), bytes that the ranks
sent through their sockets, and the peak memory of a rank while it trains (in processes of its own).
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loop import isobatch_loop, raw_loop

from isobatch.runtime import accelerator
from isobatch.runtime.distributed import Ranks

REDUCTIONS = {"fast": ["reduction=fast"], "tree": ["reduction=exact", "reduction.method=tree"],
              "bin64": ["reduction=exact", "reduction.method=bin64"]}  # fmt: skip
RAW = "raw"
MODEL = ["model=resnet18", "data=synthetic", "data.eval_samples=8"]
SMALL = ["data.image_size=64", "batch.micro=16", "batch.shard=16"]
SHARDS_OF_8 = ["batch.micro=8", "batch.shard=8"]
CASES: list[tuple[str, int, int, list[str]]] = [  # what, px, ranks, words
    ("accumulation 1, shards of 16", 64, 2, [*SMALL, "data.samples=32", "batch.effective=32"]),
    ("accumulation 3, shards of 16", 64, 2, [*SMALL, "data.samples=96", "batch.effective=96"]),
    ("accumulation 2, shards of 8", 224, 2,
     [*SHARDS_OF_8, "data.image_size=224", "data.samples=32", "batch.effective=32"]),
    ("accumulation 8, shards of 8", 64, 1, [*SHARDS_OF_8, "data.image_size=64", "data.samples=64", "batch.effective=64"]),
]  # fmt: skip


def sent_bytes() -> int:
    """Acknowledged bytes of all TCP connections of this process (tcpi_bytes_acked of Linux's tcp_info)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("<Q", info, 120)[0]
        except OSError:
            continue
    return total


def trained(words: list[str], name: str, ranks: Ranks, folder: str) -> tuple[Any, Callable[[int], None]]:
    parallel = "ddp" if ranks.world_size > 1 else "single"
    reduction = REDUCTIONS.get(name, ["reduction=exact"])
    return isobatch_loop([*MODEL, *words, *reduction, f"parallel={parallel}"], ranks, Path(folder))


def measure(ranks: Ranks, words: list[str], rounds: int) -> dict[str, list[tuple[float, float, int]]]:
    """Per loop and round: (wall seconds, CPU seconds, bytes sent) of one window in this process."""
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in (*REDUCTIONS, RAW)}
    with tempfile.TemporaryDirectory() as folder:
        loops = {}
        for name in REDUCTIONS:
            loop, loops[name] = trained(words, name, ranks, folder)
        loops[RAW] = raw_loop(loop, ranks)
        names = list(loops)
        for round_ in range(rounds + 2):  # two to warm up: bin64 finds its units, DDP lays out its buckets anew
            for name in names[round_ % 4 :] + names[: round_ % 4]:
                ranks.agree(0)  # all begin together
                wall, cpu, sent = time.perf_counter(), time.process_time(), sent_bytes()
                loops[name](1)
                ranks.agree(0)
                if round_ > 1:
                    found[name].append((time.perf_counter() - wall, time.process_time() - cpu, sent_bytes() - sent))
    return found


def peak_memory(ranks: Ranks, words: list[str], name: str) -> float:
    """Peak resident MiB of this process over three windows, from the second on."""
    with tempfile.TemporaryDirectory() as folder:
        loop, advance = trained(words, name, ranks, folder)
        if name == RAW:
            advance = raw_loop(loop, ranks)
        del loop
        gc.collect()  # of what raw's batches came from
        advance(1)
        accelerator.forget_peak_memory(torch.device("cpu"))
        advance(3)
    return accelerator.peak_memory_mb(torch.device("cpu"))


def _rank(work: Callable[..., Any], rank: int, world_size: int, store: str, args: tuple[Any, ...], results: Any) -> None:
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # what a run says of itself
    if world_size > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    results.put((rank, work(Ranks(rank, world_size, rank, world_size), *args)))
    if world_size > 1:
        dist.destroy_process_group()


def on_ranks(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank, args=(work, r, world_size, f"{folder}/store", args, results))
                     for r in range(world_size)]  # fmt: skip
        for process in processes:
            process.start()
        found = dict(results.get(timeout=3600) for _ in processes)
        for process in processes:
            process.join()
    return [found[rank] for rank in range(world_size)]


def per_round(ranks: list[Any], name: str, column: int) -> list[float]:
    pick = sum if column == 2 else max
    return [pick(values) for values in zip(*([row[column] for row in of[name]] for of in ranks), strict=True)]


def ratio(ranks: list[Any], name: str, column: int) -> float:
    """To the hand-written loop: 0 time, 1 CPU time."""
    pairs = zip(per_round(ranks, name, column), per_round(ranks, RAW, column), strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def report(case: tuple[str, int, int, list[str]], rounds: int) -> None:
    what, size, world_size, words = case
    ranks = on_ranks(world_size, measure, words, rounds)
    print(f"resnet18, {size} px, {world_size} rank(s), {what}, {rounds} rounds", flush=True)
    for name in (*REDUCTIONS, RAW):
        sent = statistics.median(per_round(ranks, name, 2)) / 2**20
        memory = max(on_ranks(world_size, peak_memory, words, name))
        print(f"  {name:6} time {ratio(ranks, name, 0):5.2f} x   CPU {ratio(ranks, name, 1):5.2f} x   sent {sent:6.1f} MiB a "
              f"window   peak of a rank {memory:5.0f} MiB", flush=True)  # fmt: skip


def rows(rounds: int = 7) -> Iterator[tuple[str, str, str]]:
    """(what, figure, compared with): time of a window on two ranks."""
    for what, size, world_size, words in CASES[:2]:
        ranks = on_ranks(world_size, measure, words, rounds)
        for name in list(REDUCTIONS)[1:]:
            yield (f"resnet18, {size} px, DDP x 2, {what}, reduction=exact ({name}): time", f"{ratio(ranks, name, 0):.2f} x",
                   "torch's DDP by hand")  # fmt: skip


def main(arguments: list[str]) -> None:
    rounds = int(arguments[1]) if len(arguments) > 1 else 9
    for case in CASES:
        if not arguments or int(arguments[0]) == case[1]:
            report(case, rounds)


if __name__ == "__main__":
    main(sys.argv[1:])
