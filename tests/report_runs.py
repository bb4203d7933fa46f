"""Run folders for the report's tests, in the format that a run leaves behind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


def write_run(
    folder: Path,
    losses: Sequence[float] = (),
    accuracy: Mapping[int, float] | None = None,
    config: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    summary: Mapping[str, Any] | None = None,
    seconds_per_step: float | None = 0.5,
) -> Path:
    """A run whose step k (from 1) logged losses[k - 1]. summary: keys that replace the usual ones."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    tree = {"seed": 0, "parallel": {"name": "single"}, **(config or {})}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    with (folder / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses, start=1):
            row = {"step": step, "update": step, "samples": 48 * step, "train/loss": loss, "train/lr": 0.1 / step}
            row |= {"train/loss_scale": 1024.0, "train/skipped_steps": 0}
            if seconds_per_step is not None:
                row["time_s"] = seconds_per_step * step
            file.write(json.dumps(row) + "\n")
            if accuracy and step in accuracy:
                evaluation = {"step": step, "eval/loss": loss, "eval/accuracy": accuracy[step], "eval/samples": 100}
                file.write(json.dumps(evaluation) + "\n")
    usual = {
        "state": "completed",
        "steps": len(losses),
        "updates": len(losses),
        "skipped_steps": 0,
        "samples": 48 * len(losses),
        "plan": {"effective_batch": 48, "micro_batch": 8, "num_replicas": 2, "accumulation_steps": 3},
        "final": {"train/loss": losses[-1]} if losses else {},
        "best": {},
        "weights_sha256": "aa11",
        "time": {"train_s": 5.0},
        "perf": {"samples_per_s": 100.0},
        "ranks": [
            {"rank": rank, "local_rank": rank, "pid": 100 + rank, "device": f"cuda:{rank}", "peak_memory_mb": mb}
            for rank, mb in enumerate((300.0, 100.0))
        ],
        "error": None,
    }
    (folder / "summary.json").write_text(json.dumps(usual | dict(summary or {})))
    return folder
