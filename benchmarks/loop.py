"""This framework against a hand-written PyTorch loop: the same model, ready batches and optimizer switches, interleaved.

    python benchmarks/loop.py            # toy MLP, resnet18 at 64 px (accumulation 1 and 3), DDP on two processes, the start
    python benchmarks/loop.py toy        # one of: toy resnet18 ddp start

Rounds alternate between both loops in one process, so that a machine that speeds up or slows down does so for both. Given
are medians over the rounds: microseconds a step that this framework adds (toy), samples/s relative to the raw loop, both
by CPU time of the process, which other work on the machine disturbs least. Both are handed the same batches, made beforehand;
what this framework does to know which samples a step reads counts as its own.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from itertools import cycle
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
       "batch.shard=null", "data.samples=3200"]  # fmt: skip


class Ready:
    """A source whose batches lie ready: one window's, handed out in turn, however often it is asked."""

    def __init__(self, feed: Any):
        self.reads_on = feed.source.reads_on
        self.batches_ = list(feed.source.batches(feed.requests(0, 1)))

    def batches(self, requests: Iterator[Any], keep: Callable[[Any], Any] | None = None) -> Iterator[Any]:
        for _, batch in zip(requests, cycle(self.batches_), strict=False):
            if keep is not None:
                keep(lambda batch=batch: batch)
            yield batch

    def aside(self) -> Any:
        return self

    def close(self) -> None:
        """Nothing runs."""


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
    loop.feed.source = Ready(loop.feed)

    def advance(steps: int) -> None:
        loop.total_steps = loop.state.step + steps
        loop.train()
        loop.audit = None  # exact's check that a shard repeats to the bit: two shards once for each start, not for each call

    return loop, advance


def raw_loop(loop: Any, ranks: Ranks, shown: Callable[[Any], Any] = lambda model: None) -> Callable[[int], None]:
    """What one would write by hand for the same training: own model, same batches, same optimizer switches."""
    import copy

    model: Any = copy.deepcopy(loop.state.model)
    own = {id(theirs): mine for theirs, mine in zip(loop.state.model.parameters(), model.parameters(), strict=True)}
    groups = [{**g, "params": [own[id(p)] for p in g["params"]]} for g in loop.state.optimizer.param_groups]
    optimizer = torch.optim.SGD(groups, lr=0.001)  # the groups carry the switches: momentum, decay, fused
    shown(model)
    if ranks.world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
    batches = loop.feed.source.batches_
    criterion = torch.nn.CrossEntropyLoss()

    def advance(steps: int) -> None:
        model.train()
        for _ in range(steps):
            for k, (inputs, targets) in enumerate(batches):
                last = k == len(batches) - 1
                if ranks.world_size > 1:
                    model.require_backward_grad_sync = last
                loss = criterion(model(inputs), targets)
                if len(batches) > 1:
                    loss = loss / len(batches)
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
                ranks.agree(0)  # all begin together
                start = time.process_time()
                advance(steps)
                taken.append(time.process_time() - start)
            theirs, mine = taken if round_ % 2 else taken[::-1]
            if round_:  # the first round warms up
                added.append((mine - theirs) / steps * 1e6)
                ratios.append(theirs / mine)
        return statistics.median(added), statistics.median(ratios)


def _rank(rank: int, world_size: int, store: str, work: Callable[..., Any], arguments: tuple[Any, ...], results: Any) -> None:
    torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # what a run says of itself
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    results.put((rank, work(*arguments, Ranks(rank, world_size, rank, world_size))))
    dist.destroy_process_group()


def on_ranks(world_size: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work(*arguments, ranks)` gives on the first of so many processes."""
    context = mp.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (world_size, f"{folder}/store", work, arguments, results)
        processes = [context.Process(target=_rank, args=(r, *args)) for r in range(world_size)]
        for process in processes:
            process.start()
        found = dict(results.get(timeout=900) for _ in processes)
        for process in processes:
            process.join()
    return found[0]


BARE = """
import torch, timm, timm.optim
model = timm.create_model('resnet18', num_classes=10)
optimizer = timm.optim.create_optimizer_v2(model, 'momentum', lr=0.1, fused=True)
{batch}
torch.nn.functional.cross_entropy(model(x), y).backward(); optimizer.step()
{end}
"""
RANDOM = "x, y = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))"
IMAGES = """
from timm.data import create_loader
from timm.data.dataset import ImageDataset
x, y = next(iter(create_loader(ImageDataset('images/train'), (3, 64, 64), 16, is_training=True, use_prefetcher=False)))
"""
LOGGED = "import wandb\nrun = wandb.init(mode='offline', dir='.'); run.log({'loss': 1.0}); run.finish()"
ONE_STEP = ["model=resnet18", "batch.effective=16", "batch.shard=null", "epochs=null", "steps=1", "threads=1", "optimizer=sgd"]
SYNTHETIC = ["data=synthetic", "data.image_size=64", "data.samples=16", "data.eval_samples=1"]
FOLDER = ["data=image_folder", "data.root=images", "data.image_size=64", "data.num_workers=0", "augment=simple"]
# what both do -> (the bare script, what is typed)
STARTS = {
    "start to the end of the first step": (BARE.format(batch=RANDOM, end=""), [*SYNTHETIC, "logger=none"]),
    "the same with images": (BARE.format(batch=IMAGES, end=""), [*FOLDER, "logger=none"]),
    "the same with W&B, offline": (BARE.format(batch=RANDOM, end=LOGGED), [*SYNTHETIC, "logger=wandb", "logger.mode=offline"]),
}


def first_steps(rounds: int = 3) -> Iterator[tuple[str, float]]:
    """(what, CPU time of `python train.py` to the end of a training of one step, relative to a bare script's)."""
    from data import write_files

    train = str(Path(__file__).parents[1] / "train.py")
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder, "images"), 64, 16)
        for what, (bare, words) in STARTS.items():
            ratios = []
            for round_ in range(rounds + 1):
                taken = []
                for command in ([sys.executable, "-c", bare], [sys.executable, train, *ONE_STEP, *words]):
                    before = of_children()
                    subprocess.run(command, check=True, cwd=folder, capture_output=True)
                    taken.append(of_children() - before)
                if round_:
                    ratios.append(taken[1] / taken[0])
            yield what, statistics.median(ratios)


def of_children() -> float:
    """CPU seconds of the processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows(which: Collection[str] = ("toy", "resnet18", "ddp", "start")) -> Iterator[tuple[str, str, str]]:
    """(what, figure, compared with), as soon as each is measured."""
    torch.set_num_threads(1)
    if "toy" in which:
        with quiet():
            added, _ = compare(TOY, steps=200, rounds=61)
        yield "step of a toy MLP, effective batch 32", f"{added:+.1f} us", "a hand-written loop, same batches and optimizer"
    for accumulation in (1, 3) if "resnet18" in which else ():
        with quiet():
            _, ratio = compare([*RESNET, f"batch.effective={16 * accumulation}", "batch.micro=16", "batch.shard=null"], 4, 9)
        yield f"resnet18, 64 px, micro 16, accumulation {accumulation}: speed", f"{ratio:.3f}", "a hand-written loop"
    for accumulation in (1, 3) if "ddp" in which else ():
        words = ["parallel=ddp", *RESNET, f"batch.effective={32 * accumulation}", "batch.micro=16", "batch.shard=null"]
        _, ratio = on_ranks(2, compare, words, 3, 7)
        yield f"the same, DDP x 2, accumulation {accumulation}: speed", f"{ratio:.3f}", "the loop in torch's DDP"
    if "start" in which:
        for what, ratio in first_steps():
            yield f"{what}: CPU time", f"{ratio:.2f} x", "a bare script on torch and timm"


@contextmanager
def quiet() -> Iterator[None]:
    """Without what a run says of itself."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


if __name__ == "__main__":
    for row in rows(sys.argv[1:] or ("toy", "resnet18", "ddp", "start")):
        print("{:<56} {:>16}   {}".format(*row), flush=True)
