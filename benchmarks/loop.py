"""This framework against a hand-written PyTorch loop: the same model, data and optimizer switches, interleaved.

    python benchmarks/loop.py            # toy MLP, resnet18 at 64 px (accumulation 1 and 3), DDP on two processes
    python benchmarks/loop.py toy        # one of: toy resnet18 ddp start

Rounds alternate between both loops in one process, so that a machine that speeds up or slows down does so for both. Given
are medians over the rounds: microseconds a step that this framework adds (toy), samples/s relative to the raw loop, both
by CPU time of the process, which other work on the machine disturbs least.
"""

from __future__ import annotations

import multiprocessing as mp
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir

from isobatch import config as configuration
from isobatch import hydra_patches
from isobatch.run import Run
from isobatch.runtime.distributed import Ranks

QUIET = ["logger=none", "threads=1", "scheduler=constant", "log_every=1000000", "optimizer=sgd", "optimizer.lr=0.001",
         "epochs=null", "steps=1000000"]  # fmt: skip
RESNET = ["model=resnet18", "data=synthetic", "data.image_size=64", "data.samples=480"]
TOY = ["model=mlp", "model.width=64", "data=synthetic", "data.image_size=8", "data.in_chans=1", "batch.effective=32",
       "data.samples=3200"]  # fmt: skip


def isobatch_loop(overrides: list[str], ranks: Ranks, folder: Path) -> tuple[Any, Callable[[int], None]]:
    """The framework's own Loop, without evaluation and saving; returns it and `advance(steps)`."""
    hydra_patches.install(["run", *overrides])
    with initialize_config_dir(str(configuration.conf_folder()), version_base="1.3"):
        plain = configuration.resolved(compose("config", overrides=[*QUIET, *overrides]))
    run = Run(configuration.load(plain), folder, ranks)
    run.build()
    loop = run.loop
    assert loop is not None
    loop.evaluate = lambda both=False: False  # type: ignore[method-assign]
    loop.checkpointer.save = lambda *args, **kwargs: None  # type: ignore[method-assign]
    loop.eval_every = 10**9

    def advance(steps: int) -> None:
        loop.total_steps = loop.state.step + steps
        loop.train()

    return loop, advance


def raw_loop(loop: Any, ranks: Ranks) -> Callable[[int], None]:
    """What one would write by hand for the same training: own model, same data tensors, same optimizer switches."""
    import copy

    model: Any = copy.deepcopy(loop.state.model)
    own = {id(theirs): mine for theirs, mine in zip(loop.state.model.parameters(), model.parameters(), strict=True)}
    groups = [{**g, "params": [own[id(p)] for p in g["params"]]} for g in loop.state.optimizer.param_groups]
    optimizer = torch.optim.SGD(groups, lr=0.001)  # the groups carry the switches: momentum, decay, fused
    if ranks.world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
    inputs, targets = loop.feed.source.inputs, loop.feed.source.targets
    plan, mine = loop.feed.plan, [v for ((v,),) in loop.feed.micro_steps]
    criterion = torch.nn.CrossEntropyLoss()
    position = 0
    order = torch.randperm(plan.epoch_size)

    def advance(steps: int) -> None:
        nonlocal position, order
        model.train()
        for _ in range(steps):
            if position + plan.batch.effective > plan.epoch_size:
                position, order = 0, torch.randperm(plan.epoch_size)
            window = order[position : position + plan.batch.effective]
            position += plan.batch.effective
            for k, v in enumerate(mine):
                index = window[v :: plan.batch.num_shards]
                last = k == len(mine) - 1
                model_sync = getattr(model, "require_backward_grad_sync", None)
                if model_sync is not None:
                    model.require_backward_grad_sync = last
                loss = criterion(model(inputs[index]), targets[index]) / len(mine)
                if k == 0:
                    optimizer.zero_grad()
                loss.backward()
            optimizer.step()

    return advance


def compare(overrides: list[str], steps: int, rounds: int, ranks: Ranks | None = None) -> tuple[float, float]:
    """(microseconds a step added, samples/s relative to the raw loop): medians over the rounds."""
    ranks = ranks or Ranks()
    with tempfile.TemporaryDirectory() as folder:
        loop, ours = isobatch_loop(overrides, ranks, Path(folder))
        raw = raw_loop(loop, ranks)
        added, ratios = [], []
        for round_ in range(rounds + 1):
            taken = []
            for advance in (raw, ours) if round_ % 2 else (ours, raw):
                ranks.barrier()
                start = time.process_time()
                advance(steps)
                taken.append(time.process_time() - start)
            theirs, mine = taken if round_ % 2 else taken[::-1]
            if round_:  # the first round warms up
                added.append((mine - theirs) / steps * 1e6)
                ratios.append(theirs / mine)
        return statistics.median(added), statistics.median(ratios)


def _rank(rank: int, world_size: int, store: str, overrides: list[str], steps: int, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    results.put((rank, compare(overrides, steps, rounds, Ranks(rank, world_size, rank, world_size))))
    dist.destroy_process_group()


def compare_on_ranks(world_size: int, overrides: list[str], steps: int, rounds: int) -> tuple[float, float]:
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (world_size, f"{folder}/store", overrides, steps, rounds, results)
        processes = [context.Process(target=_rank, args=(r, *args)) for r in range(world_size)]
        for process in processes:
            process.start()
        found = dict(results.get(timeout=900) for _ in processes)
        for process in processes:
            process.join()
    return found[0]


def first_step(rounds: int = 5) -> float:
    """Time to the end of the first step of `python train.py`, relative to a bare script that imports torch and timm."""
    bare = (
        "import torch, timm, timm.optim\n"
        "model = timm.create_model('resnet18', num_classes=10)\n"
        "optimizer = timm.optim.create_optimizer_v2(model, 'momentum', lr=0.1, fused=True)\n"
        "x, y = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))\n"
        "torch.nn.functional.cross_entropy(model(x), y).backward(); optimizer.step()\n"
    )
    train = str(Path(__file__).parents[1] / "train.py")
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(rounds + 1):
            taken = []
            for command in ([sys.executable, "-c", bare],
                            [sys.executable, train, *RESNET, "batch.effective=16", "epochs=null", "steps=1", "threads=1",
                             "data.eval_samples=1", "data.samples=16", "optimizer=sgd", "logger=none"]):  # fmt: skip
                start = time.perf_counter()
                subprocess.run(command, check=True, cwd=folder, capture_output=True)
                taken.append(time.perf_counter() - start)
            if round_:
                ratios.append(taken[1] / taken[0])
    return statistics.median(ratios)


def main(which: list[str]) -> None:
    torch.set_num_threads(1)
    if not which or "toy" in which:
        added, ratio = compare(TOY, steps=1000, rounds=15)
        print(f"toy MLP, effective batch 32            {added:+6.1f} us a step   {ratio:.3f} of raw samples/s", flush=True)
    if not which or "resnet18" in which:
        for accumulation in (1, 3):
            _, ratio = compare([*RESNET, f"batch.effective={16 * accumulation}", "batch.micro=16"], 4, 9)
            print(f"resnet18, 64 px, micro 16, accumulation {accumulation}                     "
                  f"{ratio:.3f} of raw samples/s", flush=True)  # fmt: skip
    if not which or "ddp" in which:
        for accumulation in (1, 3):
            overrides = ["parallel=ddp", *RESNET, f"batch.effective={32 * accumulation}", "batch.micro=16"]
            _, ratio = compare_on_ranks(2, overrides, 3, 7)
            print(f"resnet18, 64 px, DDP x 2, accumulation {accumulation}                      "
                  f"{ratio:.3f} of raw samples/s", flush=True)  # fmt: skip
    if not which or "start" in which:
        print(f"start to end of a first step            {first_step():.2f} x a bare torch + timm script")


if __name__ == "__main__":
    main(sys.argv[1:])
