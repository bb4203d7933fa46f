"""The precision ladder on one device: images/s, peak memory, dtypes and loss curves of every level, as one table.

    python benchmarks/gpu_ladder.py --out ladder                          # resnet50, 224 px: under 8 minutes on one GPU
    python benchmarks/gpu_ladder.py --out ladder --small                  # the same on a CPU, in a minute

Writes ladder.json and ladder.md into the folder. Every level trains on the same random images from the same weights; the
first steps are left out of the timing. `--seconds` bounds the whole: what no longer fits is listed as left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from isobatch import config, hydra_patches, run
from isobatch.runtime.distributed import Ranks
from isobatch.train import loop

LEVELS = ("fp32", "tf32", "amp", "bf16", "O2", "bf16_pure", "O3")  # O0 is fp32, O1 is amp
COMPILED = ("fp32", "amp", "bf16", "O2")
LARGE = ("model=resnet50", "data.image_size=224", "data.num_classes=1000", "data.samples=1280", "batch.effective=128",
         "batch.shard=null")  # fmt: skip
# 48 px leave 2 x 2 in the last layers: a 3 x 3 convolution of half tensors over 1 x 1 reads what nobody wrote on some CPUs
SMALL = ("model=timm", "model.arch=test_resnet", "data.image_size=48", "data.samples=32", "batch.effective=4", "threads=1")
BASE = (
    "data=synthetic", "data.eval_samples=16", "optimizer=sgd", "optimizer.lr=0.01", "optimizer.weight_decay=0",
    "scheduler=constant", "logger=none", "checkpoint=none", "epochs=null", "log_every=1",
)  # fmt: skip


def plain(words: list[str]) -> dict[str, Any]:
    hydra_patches.install(["run", *words])
    with initialize_config_dir(str(config.conf_folder()), version_base="1.3"):
        return config.resolved(compose("config", overrides=words))


def dtypes(state: Any, parts: Any) -> dict[str, str]:
    """What a level means, read off a run: the columns of the dtype table."""

    def names(tensors: Any) -> str:
        found = {str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()}
        return ", ".join(sorted(found))

    module = parts.working.module
    norms = [m for m in module.modules() if getattr(m, "running_mean", None) is not None]
    of_norms = {id(p) for m in norms for p in m.parameters()}
    with parts.precision.autocast(parts.device):
        kind = parts.device.type
        autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
    return {
        "weights": names(p for p in module.parameters() if id(p) not in of_norms),
        "batch norm": names(t for m in norms for t in (*m.parameters(), *m.buffers())),
        "updated": names(p for group in state.optimizer.param_groups for p in group["params"]),
        "autocast": autocast.removeprefix("torch."),
        "loss scale": f"{state.scaler.get_scale():g}" if state.scaler.is_enabled() else "none",
        "checkpoint": names(state.model.state_dict().values()),
    }


def measure(folder: Path, words: list[str]) -> dict[str, Any]:
    """Train once; returns images/s, peak memory, skipped steps, dtypes and the loss of every step."""
    folder.mkdir(parents=True)
    seen: dict[str, Any] = {}
    original = loop.train_step

    def watched(state: Any, parts: Any, *rest: Any, **options: Any) -> Any:
        seen.update(state=state, parts=parts)
        return original(state, parts, *rest, **options)

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    loop.train_step = watched
    try:
        run.run_job(plain(words), folder, Ranks())
    finally:
        loop.train_step = original
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "images/s": round(summary["perf"]["samples_per_s"], 1),
        "peak MB": summary["ranks"][0]["peak_memory_mb"],
        "skipped": summary["skipped_steps"],
        "first step s": round(summary["time"]["first_step_s"], 1),
        "dtypes": dtypes(seen["state"], seen["parts"]),
        "losses": [row["train/loss"] for row in rows if "train/loss" in row],
    }


def apart(losses: list[float], reference: list[float], width: int) -> float:
    """Largest relative distance of two loss curves, each smoothed over `width` steps."""

    def smooth(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).unfold(0, width, 1).mean(1)

    a, b = smooth(losses), smooth(reference)
    return float(((a - b).abs() / b.abs().clamp(min=1e-3)).max())


def table(results: dict[str, Any], device: str, steps: int, width: int) -> str:
    """The measurements as Markdown."""
    reference = results.get("fp32", {}).get("losses")
    lines = [f"{device}, torch {torch.__version__}", ""]
    lines += ["| level | images/s | peak MB | skipped | last loss | curve apart from fp32 |", "|---|---|---|---|---|---|"]
    for name, found in results.items():
        if "left out" in found:
            lines.append(f"| {name} | {found['left out']} | | | | |")
            continue
        same = reference is not None and len(found["losses"]) == len(reference) >= width
        distance = f"{apart(found['losses'], reference, width):.3f}" if same else ""
        lines.append(f"| {name} | {found['images/s']} | {found['peak MB']} | {found['skipped']} | "
                     f"{sum(found['losses'][-width:]) / width:.4f} | {distance} |")  # fmt: skip
    lines += ["", f"{steps} steps, losses smoothed over {width} steps. Dtypes as found during the run:", ""]
    columns = ("weights", "batch norm", "updated", "autocast", "loss scale", "checkpoint")
    lines += [f"| level | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, found in results.items():
        if "dtypes" in found:
            lines.append(f"| {name} | {' | '.join(found['dtypes'][c] for c in columns)} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--small", action="store_true", help="a small network and image, for a CPU")
    parser.add_argument("--steps", type=int, default=200, help="of the loss curves")
    parser.add_argument("--seconds", type=float, default=420, help="start no further run after this")
    parser.add_argument("--levels", default=",".join(LEVELS))
    parser.add_argument("--compiled", default=",".join(COMPILED), help="levels that are also run with compile=true")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    chosen.out.mkdir(parents=True)
    started = time.perf_counter()
    warmup = min(20, chosen.steps // 4)
    base = [*BASE, *(SMALL if chosen.small else LARGE), "channels_last=true", f"warmup={warmup}"]
    jobs = [(level, level, chosen.steps, "compile=false") for level in chosen.levels.split(",") if level]
    jobs += [(f"{level} compiled", level, min(60, chosen.steps), "compile=true")
             for level in chosen.compiled.split(",") if level]  # fmt: skip
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"
    results: dict[str, Any] = {}
    for name, level, steps, compiled in jobs:
        if time.perf_counter() - started > chosen.seconds:
            results[name] = {"left out": f"left out: {chosen.seconds:g} s were over"}
        else:
            words = [*base, f"precision={level}", compiled, f"steps={steps}", f"eval_every={steps}"]
            results[name] = measure(chosen.out / name.replace(" ", "-"), words)
        (chosen.out / "ladder.json").write_text(json.dumps({"device": device, "levels": results}, indent=1) + "\n")
        (chosen.out / "ladder.md").write_text(table(results, device, chosen.steps, min(20, chosen.steps)))
    print((chosen.out / "ladder.md").read_text())


if __name__ == "__main__":
    main()
