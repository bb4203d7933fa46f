"""What it costs to keep several shards apart in one forward, and what it gains over a forward for each.

    python benchmarks/shards.py                      # resnet18 and ViT-Ti at 64 px: 6 shards of 8
    python benchmarks/shards.py resnet50 --px 224 --shard 8 --shards 4 --device cuda

Of a whole micro step (forward, loss, backward), interleaved rounds of
- `together`: one forward of all shards, each as if alone;
- `plain`: one forward of the same samples as one shard (another training where there is batch norm or dropout);
- `alone`: a forward for each shard (the same training as `together`).
Told are the medians of the rounds' ratios: together / plain is the price, together / alone the gain. On a CPU it is the time of
the process on one thread, which other programs hardly disturb; on a device it is time by the clock.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median

import timm
import torch
from torch.nn import functional

from isobatch.data.feed import MicroBatch
from isobatch.shards.layout import Lanes, Layout
from isobatch.shards.side_by_side import SideBySide


def micro(shards: tuple[int, ...], lanes: Lanes, inputs: torch.Tensor, targets: torch.Tensor) -> MicroBatch:
    return MicroBatch(shards, lanes, inputs, targets, 1.0, True, True)


def kinds(arch: str, px: int, shard: int, shards: int, device: torch.device, drop: float) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    options = {"img_size": px} if arch.startswith(("vit", "deit")) else {}
    model = timm.create_model(arch, num_classes=10, drop_rate=drop, drop_path_rate=drop, **options).to(device).train()
    inputs, targets = torch.randn(shard * shards, 3, px, px, device=device), torch.randint(10, (shard * shards,), device=device)
    apart = SideBySide(0, [device], True, shard)
    whole = micro((0,), Lanes.alone((shard * shards,)), inputs, targets)
    several = micro(tuple(range(shards)), Lanes((Layout((shard,) * shards),)), inputs, targets)
    each = [micro((v,), Lanes.alone((shard,)), inputs[v::shards].contiguous(), targets[v::shards]) for v in range(shards)]

    def step(batch: MicroBatch, weight: float = 1.0) -> None:
        with apart(0, batch):
            (functional.cross_entropy(model(batch.inputs), batch.targets) * weight).backward()

    def alone() -> None:
        for batch in each:
            step(batch, 1 / shards)

    return {"together": lambda: step(several), "plain": lambda: step(whole), "alone": alone}


def timed(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.accelerator.synchronize()
    start = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - start


def compare(arch: str, px: int, shard: int, shards: int, device: torch.device, rounds: int, drop: float) -> dict[str, float]:
    """Medians: `price` = together / plain, `gain` = together / alone, and seconds of each."""
    work = kinds(arch, px, shard, shards, device, drop)
    for one in work.values():
        one()
    found = [{name: timed(one, device) for name, one in work.items()} for _ in range(rounds)]
    return {
        "price": median(r["together"] / r["plain"] for r in found), "gain": median(r["together"] / r["alone"] for r in found),
        **{name: median(r[name] for r in found) for name in work},
    }  # fmt: skip


def rows(archs: tuple[str, ...] = ("resnet18", "vit_tiny_patch16_224")) -> Iterator[tuple[str, str, str]]:
    """(what, figure, compared with): CPU time of a micro step of 6 shards of 8 at 64 px."""
    torch.set_num_threads(1)
    for arch in archs:
        found = compare(arch, 64, 8, 6, torch.device("cpu"), 7, 0.1)
        what = f"{arch}, 64 px, 6 shards in one forward: time"
        yield what, f"{found['price']:.3f} x", "the same samples as one shard"
        yield what, f"{found['gain']:.3f} x", "a forward for each shard"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archs", nargs="*", default=["resnet18", "vit_tiny_patch16_224"])
    parser.add_argument("--px", type=int, default=64)
    parser.add_argument("--shard", type=int, default=8)
    parser.add_argument("--shards", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--drop", type=float, default=0.1, help="dropout and drop path")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    for arch in args.archs:
        found = compare(arch, args.px, args.shard, args.shards, torch.device(args.device), args.rounds, args.drop)
        print(f"{arch} at {args.px} px, {args.shards} shards of {args.shard}: together / plain {found['price']:.3f}, "
              f"together / alone {found['gain']:.3f} (s: together {found['together']:.3f}, plain {found['plain']:.3f}, "
              f"alone {found['alone']:.3f})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
