"""Runs for tests: compose a config, train in this process or on forked ranks, and keep what each step left behind."""

from __future__ import annotations

import functools
import json
import multiprocessing as mp
import pickle
import queue
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from isobatch import config as configuration
from isobatch import data, hydra_patches, run
from isobatch.data import DataInfo, Split, Splits
from isobatch.hydra_patches import refusals
from isobatch.runtime.distributed import Ranks
from isobatch.runtime.dtensor import whole
from isobatch.train import loop

TIME_LIMIT_S = 200.0  # of anything that runs several ranks: a hang is a failure
# small, quiet and quick; every test adds what it is about
BASE = ("logger=none", "model=mlp", "model.width=16", "model.depth=1", "threads=1", "scheduler=constant")


def plain(*overrides: str) -> dict[str, Any]:
    """The resolved config that `python train.py <overrides>` would train with."""
    if any(word.startswith("resume=") for word in overrides):  # whose settings are in a folder that may have changed since
        return configuration.resolved(pickle.loads(_composed.__wrapped__(*overrides)))
    groups = tuple(word for word in overrides if not OPTION.match(word) or word.partition("=")[0] in GROUPS)
    made = pickle.loads(_composed(*groups))  # a copy, five times as quick as deepcopy
    options = OverridesParser.create().parse_overrides([word for word in overrides if word not in groups])
    with hydra_patches.active(["run", *overrides]):
        refusals.apply_overrides(options, made)
    return configuration.resolved(made)


OPTION = re.compile(r"(?!hydra\.)[a-z_][a-z0-9_.]*=")  # not what is added, taken away or swept
GROUPS = {entry.name for entry in configuration.conf_folder().iterdir() if entry.is_dir()} | {"resume"}


@functools.lru_cache(maxsize=256)  # Hydra takes as long to compose as a small training; to set an option is quick
def _composed(*groups: str) -> bytes:
    folder = str(configuration.conf_folder())
    with hydra_patches.active(["run", *groups]), initialize_config_dir(folder, version_base="1.3"):
        return pickle.dumps(compose("config", overrides=list(groups)), pickle.HIGHEST_PROTOCOL)


@dataclass
class Record:
    """What one rank saw. `weights`: flat trainable weights after each step; `ids`: sample indices of each step."""

    weights: list[list[float]] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    result: Any = None
    error: str = ""

    @property
    def last(self) -> list[float]:
        """The last entry of the flat weights after each step: the bias of a linear probe."""
        return [w[-1] for w in self.weights]


def train(folder: Path, *overrides: str, ranks: Ranks | None = None, observe: Callable[..., None] | None = None,
          made: dict[str, Any] | None = None) -> Record:  # fmt: skip
    """Train in this process. `observe(state, parts, data)` is called after every step; `made`: a config, not overrides."""
    folder.mkdir(parents=True, exist_ok=True)
    # a second run in a folder goes on from the first one's checkpoints: a test that wants that says so
    assert not (folder / "checkpoints").exists() or any("resume=" in word for word in overrides), f"{folder} is used twice"
    record, original = Record(), loop.train_step

    def recording(state: Any, parts: Any, window: Any, want_norm: bool = False) -> Any:
        if iter(window.micro_batches) is window.micro_batches:
            window.micro_batches = list(window.micro_batches)
        applied, norm = original(state, parts, window, want_norm)
        record.weights.append(torch.cat([whole(p).detach().reshape(-1).double() for p in state.parameters]).tolist())
        record.lrs.append(state.optimizer.param_groups[0]["lr"])
        record.norms.append(None if norm is None else float(norm))
        # a loss with a teacher or with views has more than labels among its targets; the labels come first
        labels = [m.targets if isinstance(m.targets, torch.Tensor) else m.targets[0]
                  for m in window.micro_batches]  # fmt: skip
        record.ids.append([int(t) for part in labels for t in part.reshape(len(part), -1)[:, 0]])
        if observe is not None:
            observe(state, parts, window)
        return applied, norm

    loop.train_step = recording
    try:
        record.result = run.run_job(made or plain(*overrides), folder, ranks or Ranks())
    finally:
        loop.train_step = original
    return record


def train_ranks(world_size: int, folder: Path, *overrides: str, timeout_s: float = 150,
                strategy: str = "ddp") -> list[Record]:  # fmt: skip
    """Train `parallel=<strategy>` on forked ranks; returns every rank's record. Raises when one fails or time is up."""

    words = (f"parallel={strategy}", *overrides)
    made = plain(*words)  # once, and in time for the next test too: what a forked rank caches is gone with it

    def work(ranks: Ranks) -> Record:
        return train(folder, *words, ranks=ranks, made=made)

    return on_ranks(world_size, folder, work, timeout_s)


def on_ranks(world_size: int, folder: Path, work: Callable[[Ranks], Any], timeout_s: float = 150) -> list[Any]:
    """`work(ranks)` on `world_size` forked processes with a gloo group; returns the results in rank order."""
    import torch._dynamo  # before the fork: every optimizer imports it, which takes each rank seconds

    folder.mkdir(parents=True, exist_ok=True)
    context = mp.get_context("fork")
    results: Any = context.Queue()
    store = folder / f"store-{time.monotonic_ns()}"

    def entry(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", store=dist.FileStore(str(store), world_size), rank=rank,
                                    world_size=world_size, timeout=timedelta(seconds=timeout_s))  # fmt: skip
            results.put((rank, work(Ranks(rank, world_size, rank, world_size)), ""))
            dist.destroy_process_group()
        except BaseException:
            results.put((rank, None, traceback.format_exc()))

    processes = [context.Process(target=entry, args=(rank,), daemon=True) for rank in range(world_size)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    end = time.monotonic() + TIME_LIMIT_S
    try:
        while len(found) < world_size:
            rank, result, error = results.get(timeout=max(0.1, end - time.monotonic()))
            if error:
                raise AssertionError(f"rank {rank} failed:\n{error}")
            found[rank] = result
    except queue.Empty:
        raise AssertionError(f"ranks {sorted(set(range(world_size)) - set(found))} hang") from None
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()
    return [found[rank] for rank in range(world_size)]


def rows(folder: Path, key: str) -> list[Any]:
    """The values of `key` in the folder's metrics.jsonl, in order; rows without it are left out."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row[key] for row in map(json.loads, lines) if key in row]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


class MeanProbe:
    """Inputs 0, targets as given: with one linear layer from zero, squared error, SGD and lr 0.5 the bias after a step
    is the mean target of exactly the samples in its window."""

    name, kind, num_workers = "mean_probe", "vectors", None

    def __init__(self, targets: list[float]):
        self.targets = targets

    def load(self, augment: Any, seed: int) -> Splits:
        targets = torch.tensor(self.targets, dtype=torch.float32).unsqueeze(1)
        inputs = torch.zeros_like(targets)
        split = Split(torch.utils.data.TensorDataset(inputs, targets), (inputs, targets))
        return Splits(split, split, DataInfo("mean_probe", (1,)))


def mean_probe(targets: list[float]) -> tuple[str, ...]:
    """Overrides of a mean probe over `targets`; its data joins the table under a name of its own."""
    from dataclasses import make_dataclass

    name = "probe_" + "_".join(f"{t:g}" for t in targets)
    load = MeanProbe(targets).load
    data.TABLE[name] = make_dataclass(
        "Probe", [("name", str, name), ("size", Any, None), ("matrix_seed", Any, None), ("num_workers", int | None, None)],
        frozen=True, namespace={"kind": "vectors", "load": lambda self, augment, seed: load(augment, seed)},
    )  # fmt: skip
    return (*PROBE, "data=random_matrix", f"data.name={name}")


PROBE = (
    "logger=none", "threads=1", "model=linear", "model.init=zeros", "loss=mse", "optimizer=sgd", "optimizer.lr=0.5",
    "optimizer.momentum=0", "optimizer.weight_decay=0", "scheduler=constant", "sampler=sequential", "epochs=1", "log_every=1",
)  # fmt: skip
