"""One GPU in one table: speed, memory and waits beside a hand-written loop and timm's way, in under nine minutes.

    python benchmarks/gpu.py --out gpu            # writes gpu/gpu.md and gpu/gpu.json, a row as soon as it is measured
    python benchmarks/gpu.py --out gpu --small    # tiny networks: whether it runs at all (tests do so, without a GPU)
    python benchmarks/gpu.py --out gpu --only networks reduction

Contenders of one row have the same weights, batches that lie ready on the device and optimizer switches, and take turns in
one process; figures are medians over the turns. The most telling sections come first: what no longer fits into `--seconds`
is listed as left out, and what fails as failed (exit code 1), while the rest is measured.

    tests       what tests/ ask of a real device (`pytest -m gpu`)
    networks    resnet50, vit_small, convnext_tiny at 224 px in bf16 and fp16: images/s, peak memory, the host's share of a step
    graphs      networks whose steps the host cannot give out fast enough, with and without cuda_graph=true
    reduction   reduction=exact, tree (one shard at a time, and four on streams) and bin64, against fast
    planner     the memory that task=plan foresees, against the allocator's peak
    files       JPEG files on the way to the device, against batches that lie there
    compiled    compile=true, against a compiled hand-written loop
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders import MB, Contender, by_hand, in_turns, ours
from data import write_files
from hydra import compose, initialize_config_dir
from table import Row

from isobatch import config, hydra_patches, run
from isobatch.runtime import accelerator
from isobatch.runtime.distributed import Ranks

ROOT = Path(__file__).parents[1]
LEVELS = {"bf16": ("precision=bf16", torch.bfloat16), "fp16": ("precision=amp precision.dtype=float16", torch.float16)}
LARGE = {"resnet50": "model=resnet50", "vit_small": "model=vit_small", "convnext_tiny": "model=timm model.arch=convnext_tiny"}
SMALL = {"test_resnet": "model=timm model.arch=test_resnet"}
BOUND = {"resnet18 at 32 px": "model=resnet18 data.image_size=32", "mlp": "model=mlp data.image_size=8"}
REDUCTIONS = {"fast": "reduction=fast", "tree": "reduction=exact reduction.method=tree threads=1",
              "bin64": "reduction=exact reduction.method=bin64 threads=1",
              "streams": "reduction=exact reduction.method=tree threads=4"}  # fmt: skip
Measure = Callable[[], Row]


class Bench:
    """The sections, and what they share: sizes, device, folders. A section yields its rows unmeasured."""

    def __init__(self, small: bool, until: float, folder: Path):
        self.small, self.until, self.folder = small, until, folder
        found = torch.accelerator.current_accelerator(check_available=True)
        self.device = torch.device("cpu") if found is None else torch.device(found.type, 0)
        self.networks, self.samples = (SMALL, 8) if small else (LARGE, 128)
        self.turns = partial(in_turns, device=self.device, turns=1 if small else 3, steps=1 if small else 10,
                             warm=1 if small else 8)  # fmt: skip
        self.image = f"data=synthetic data.image_size={32 if small else 224} data.num_classes={10 if small else 1000}"
        self.folders, self.opened = 0, list[Any]()

    def place(self) -> Path:
        self.folders += 1
        return self.folder / str(self.folders)

    def words(self, *words: str, level: str = "bf16", samples: int = 0) -> list[str]:
        size = samples or self.samples
        base = f"data.samples={size} data.eval_samples=2 batch.effective={size} optimizer=sgd checkpoint=none logger=none"
        return " ".join([self.image, base, LEVELS[level][0], *words]).split()

    def ours(self, words: list[str], samples: int = 0) -> tuple[Any, Contender]:
        loop, contender = ours(words, self.place(), samples or self.samples)
        self.opened.append(loop.files)
        return loop, contender

    def tidy(self) -> None:
        """After a row: nothing of its contenders is left."""
        while self.opened:
            self.opened.pop().close()
        gc.collect()
        accelerator.empty_cache(self.device)

    def tests(self) -> Iterator[Measure]:
        def measure() -> Row:
            limit = max(30.0, min(150.0, self.until - time.perf_counter()))
            done = subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-n", "0", "tests"], cwd=ROOT,
                                  capture_output=True, text=True, timeout=limit)  # fmt: skip
            last = (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1]
            if done.returncode:
                raise RuntimeError(last)
            return Row("pytest -m gpu", "passed", last)

        if not self.small:
            yield measure

    def network(self, name: str, level: str, compiled: bool = False) -> Row:
        loop, contender = self.ours(self.words(self.networks[name], f"compile={str(compiled).lower()}", level=level))
        raw = partial(by_hand, loop, LEVELS[level][1], self.samples)
        ways: dict[str, Callable[[], Contender]] = {"ours": lambda: contender, "raw": partial(raw, compiled=compiled)}
        if not compiled:
            ways["timm"] = partial(raw, timms=True)
        found = self.turns(ways)
        return Row(f"{name}, {level}{', compiled' * compiled}, batch {self.samples}: {found['ours'].told()}",
                   f"{found['ours'].rate / found['raw'].rate:.3f} of raw",
                   "; ".join(f"{way} {one.told()}" for way, one in found.items() if way != "ours"))  # fmt: skip

    def networks_(self) -> Iterator[Measure]:
        return (partial(self.network, name, level) for name in self.networks for level in LEVELS)

    def compiled(self) -> Iterator[Measure]:
        return (partial(self.network, name, "bf16", True) for name in self.networks)

    def graphs(self) -> Iterator[Measure]:
        def measure(name: str, size: int = 32) -> Row:
            words = self.words(BOUND[name], samples=size)
            loop, contender = self.ours(words, size)
            found = self.turns({"run": lambda: contender, "raw": partial(by_hand, loop, torch.bfloat16, size),
                                "replayed": lambda: self.ours([*words, "cuda_graph=true"], size)[1]})  # fmt: skip
            return Row(f"{name}, bf16, batch {size}, cuda_graph=true: {found['replayed'].told()}",
                       f"{found['replayed'].rate / found['run'].rate:.2f} of run",
                       f"run {found['run'].told()}; raw {found['raw'].told()}")  # fmt: skip

        return (partial(measure, name) for name in BOUND)

    def reduction(self) -> Iterator[Measure]:
        def measure(name: str) -> Row:
            micro = self.samples // 4
            base = self.networks[name], f"batch.shard={micro}"
            made = {kind: self.words(*base, f"batch.micro={self.samples if kind == 'streams' else micro}", words)
                    for kind, words in REDUCTIONS.items()}  # fmt: skip
            found = self.turns({kind: lambda words=words: self.ours(words)[1] for kind, words in made.items()})
            rates = (f"{one.rate / found['fast'].rate:.2f}" for kind, one in found.items() if kind != "fast")
            told = "; ".join(f"{kind} {one.told()}" for kind, one in found.items() if kind != "fast")
            return Row(f"{name}, bf16, 4 shards of {micro}: {told}", f"{', '.join(rates)} of fast", found["fast"].told())

        yield partial(measure, next(iter(self.networks)))

    def planner(self) -> Iterator[Measure]:
        def measure(name: str) -> Row:
            words = self.words(self.networks[name])
            job([*words, "task=plan"], place := self.place())
            foreseen = json.loads((place / "plan.json").read_text())["memory_mb"]["peak"]
            found = self.turns({"ours": lambda: self.ours(words)[1]})["ours"].peak / MB
            ratio = f"{foreseen / found:.2f} of the peak" if found else "no figure"
            return Row(f"{name}, bf16, batch {self.samples}: {foreseen:,.0f} MB foreseen", ratio, f"{found:,.0f} MB allocated")

        return (partial(measure, name) for name in self.networks)

    def files(self) -> Iterator[Measure]:
        def measure(name: str) -> Row:
            side, steps, count = (40, 2, self.samples) if self.small else (256, 60, 512)
            write_files(self.folder / "jpegs", side, count)
            workers = 0 if self.small else min(16, len(os.sched_getaffinity(0)))
            size = f"{self.image.split()[1]} data.num_workers={workers}"
            lengths = [f"steps={steps}", f"eval_every={steps}", f"warmup={steps // 3}", "epochs=null"]
            ready = self.words(self.networks[name])
            rest = [word for word in ready if not word.startswith("data")]
            rates = []
            for words in (ready, [*rest, "data=image_folder", f"data.root={self.folder / 'jpegs'}", *size.split()]):
                job([*words, *lengths], place := self.place())
                rates.append(json.loads((place / "summary.json").read_text())["perf"]["samples_per_s"])
            return Row(f"{name}, bf16, from {side}-px JPEGs, {workers} workers: {rates[1]:,.0f}/s",
                       f"{rates[1] / rates[0]:.2f} of ready", f"{rates[0]:,.0f}/s of data on the device")  # fmt: skip

        yield partial(measure, next(iter(self.networks)))


SECTIONS: dict[str, Callable[[Bench], Iterator[Measure]]] = {
    "tests": Bench.tests, "networks": Bench.networks_, "graphs": Bench.graphs, "reduction": Bench.reduction,
    "planner": Bench.planner, "files": Bench.files, "compiled": Bench.compiled,
}  # fmt: skip


def job(words: list[str], folder: Path) -> None:
    hydra_patches.install(["run", *words])
    with initialize_config_dir(str(config.conf_folder()), version_base="1.3"):
        plain = config.resolved(compose("config", overrides=words))
    folder.mkdir(parents=True, exist_ok=True)
    run.run_job(plain, folder, Ranks())


def table(head: str, rows: list[Row]) -> str:
    lines = [head, "", "| what | figure | compared with |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of gpu.md and gpu.json")
    parser.add_argument("--small", action="store_true", help="tiny networks, one turn")
    parser.add_argument("--seconds", type=float, default=480, help="begin nothing after this")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS], metavar="SECTION", help=", ".join(SECTIONS))
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    failed, until = 0, time.perf_counter() + chosen.seconds
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(chosen.small, until, Path(folder))
        head = f"{accelerator.name(bench.device)}, torch {torch.__version__}"
        for section in chosen.only:
            for number, measure in enumerate(SECTIONS[section](bench), 1):
                try:
                    row = Row(f"{section} {number}", "left out", f"{chosen.seconds:g} s were over")
                    row = measure() if time.perf_counter() < until else row
                except Exception as error:  # a GPU is lent for minutes: the other rows are still wanted
                    failed, line = 1, " ".join(f"{type(error).__name__}: {error}".split())
                    row = Row(f"{section} {number}", "failed", line[:300].replace("|", "/"))
                bench.tidy()
                rows.append(row)
                print(f"{section}: {' | '.join(row)}", flush=True)
                (chosen.out / "gpu.json").write_text(json.dumps({"device": head, "rows": rows}, indent=1) + "\n")
                (chosen.out / "gpu.md").write_text(table(head, rows))
    return failed


if __name__ == "__main__":
    sys.exit(main())
