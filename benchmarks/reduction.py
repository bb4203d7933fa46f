"""What reduction=exact costs: tree and bin64 against fast (torch's DDP), in one interleaved run.

    python benchmarks/reduction.py            # resnet18 at 64 and 224 px on two ranks, then at 64 px in one process
    python benchmarks/reduction.py 64 7       # one size, with this many rounds

Rounds alternate between the reductions in the same processes, so that a machine that speeds up or slows down does so for
all. Given are medians over the rounds of ratios to fast: time and CPU time of a window (the slower rank's), bytes that
the ranks sent through their sockets, and the peak memory that each reduction needs on top of fast's (its own processes).
"""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
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
from loop import isobatch_loop

from isobatch.runtime.distributed import Ranks

REDUCTIONS = {"fast": ["reduction=fast"], "tree": ["reduction=exact", "reduction.method=tree"],
              "bin64": ["reduction=exact", "reduction.method=bin64"]}  # fmt: skip
MODEL = ["model=resnet18", "data=synthetic", "data.eval_samples=8", "batch.micro=8"]
SIZES = {64: ["data.image_size=64", "data.samples=64", "batch.effective=64"],
         224: ["data.image_size=224", "data.samples=32", "batch.effective=32"]}  # fmt: skip


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


def measure(ranks: Ranks, size: int, rounds: int) -> dict[str, list[tuple[float, float, int]]]:
    """Per reduction and round: (wall seconds, CPU seconds, bytes sent) of one window in this process."""
    parallel = "ddp" if ranks.world_size > 1 else "single"
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in REDUCTIONS}
    with tempfile.TemporaryDirectory() as folder:
        loops = {
            name: isobatch_loop([*MODEL, *SIZES[size], *reduction, f"parallel={parallel}"], ranks, Path(folder))[1]
            for name, reduction in REDUCTIONS.items()
        }
        names = list(loops)
        for round_ in range(rounds + 2):  # two to warm up: bin64 finds its units, DDP lays out its buckets anew
            for name in names[round_ % 3 :] + names[: round_ % 3]:
                ranks.agree(0)  # all begin together
                wall, cpu, sent = time.perf_counter(), time.process_time(), sent_bytes()
                loops[name](1)
                ranks.agree(0)
                if round_ > 1:
                    found[name].append((time.perf_counter() - wall, time.process_time() - cpu, sent_bytes() - sent))
    return found


def peak_memory(ranks: Ranks, size: int, name: str) -> float:
    """Peak resident MiB of this process over three windows."""
    parallel = "ddp" if ranks.world_size > 1 else "single"
    with tempfile.TemporaryDirectory() as folder:
        _, advance = isobatch_loop([*MODEL, *SIZES[size], *REDUCTIONS[name], f"parallel={parallel}"], ranks, Path(folder))
        advance(3)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


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


def report(world_size: int, size: int, rounds: int) -> None:
    ranks = on_ranks(world_size, measure, size, rounds)

    def per_round(name: str, column: int) -> list[float]:
        pick = sum if column == 2 else max
        return [pick(found[name][k][column] for found in ranks) for k in range(rounds)]

    samples = SIZES[size][2].split("=")[1]
    print(f"resnet18, {size} px, {world_size} rank(s), {samples} samples in shards of 8, {rounds} rounds", flush=True)
    for name in REDUCTIONS:
        wall, cpu = (statistics.median(a / b for a, b in zip(per_round(name, c), per_round("fast", c), strict=True))
                     for c in (0, 1))  # fmt: skip
        sent = statistics.median(per_round(name, 2)) / 2**20
        print(f"  {name:6} time {wall:5.2f} x   CPU {cpu:5.2f} x   sent {sent:6.1f} MiB a window", flush=True)
    memory = {name: max(on_ranks(world_size, peak_memory, size, name)) for name in REDUCTIONS}
    beyond = ", ".join(f"{name} {memory[name] - memory['fast']:+.0f} MiB" for name in ("tree", "bin64"))
    print(f"  peak memory of a rank beyond fast's: {beyond}", flush=True)


def rows(size: int = 64, rounds: int = 7) -> Iterator[tuple[str, str, str]]:
    """(what, figure, compared with): time of a window on two ranks."""
    ranks = on_ranks(2, measure, size, rounds)
    for name in list(REDUCTIONS)[1:]:
        ratios = [max(of[name][k][0] for of in ranks) / max(of["fast"][k][0] for of in ranks) for k in range(rounds)]
        yield (f"resnet18, {size} px, DDP x 2, reduction=exact ({name}): time", f"{statistics.median(ratios):.2f} x",
               "reduction=fast (torch's DDP)")  # fmt: skip


def main(arguments: list[str]) -> None:
    sizes = [int(arguments[0])] if arguments else list(SIZES)
    rounds = int(arguments[1]) if len(arguments) > 1 else 9
    for size in sizes:
        report(2, size, rounds)
    if 64 in sizes:
        report(1, 64, rounds)


if __name__ == "__main__":
    main(sys.argv[1:])
