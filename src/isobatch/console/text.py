"""The words and numbers that every console shows, as plain text."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isobatch.logger import job_facts

NAMES = {
    "accuracy_top5": "top-5",
    "mean_iou": "mean IoU",
    "map": "mAP",
    "f1": "F1",
    "mae": "MAE",
    "rmse": "RMSE",
    "r2": "R2",
    "grad_norm": "gradient norm",
    "loss_scale": "loss scale",
    "skipped_steps": "skipped",
}


def to_log(lines: Sequence[str]) -> None:
    """`lines` to train.log and whatever else listens, but not to the terminal, which has them already."""
    terminal = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    handlers = [h for h in logging.getLogger().handlers if getattr(h, "stream", None) not in terminal]
    for line in lines:
        record = logging.LogRecord("isobatch", logging.INFO, __file__, 0, line, None, None)
        for handler in handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def number(value: float) -> str:
    """About four significant digits: 0.1234, 1234, 9.8e-04."""
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}" if value else "0"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"


def value_of(metric: str, value: float | str) -> str:
    """A metric's value with its unit; strings stand for numbers that are not finite."""
    if isinstance(value, str):
        return value
    return f"{100 * value:.2f} %" if "accuracy" in metric else number(value)


def name_of(metric: str) -> str:
    short = metric.partition("/")[2] or metric
    return NAMES.get(short, short.replace("_", " "))


def duration(seconds: float) -> str:
    """0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rate(samples_per_s: float | None) -> str:
    return "" if samples_per_s is None else f"{samples_per_s:,.0f} samples/s"


def relative(text: str) -> str:
    """`text` with paths below the working folder as a person there would type them."""
    return text.replace(os.getcwd() + os.sep, "")


def columns(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Label and text below each other, aligned."""
    width = max((len(label) for label, _ in pairs), default=0)
    return [f"  {label:<{width}}  {text}" for label, text in pairs]


def metrics_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of an evaluation's metrics, and the first weights with `log_weights`; counts are none."""
    weights = " ".join(f"{weight:.6f}" for weight in row.get("weights") or ())
    return [(name_of(key), value_of(key, value)) for key, value in row.items()
            if key.startswith("eval/") and key != "eval/samples"] + ([("weights", weights)] if weights else [])  # fmt: skip


def compared(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(metric, final, best or "") of a summary, evaluation first."""
    final, best = summary.get("final") or {}, summary.get("best") or {}
    shown = [key for key in final if key.startswith("eval/") and key != "eval/samples"]
    shown += [key for key in ("train/loss",) if key in final]
    return [(key, value_of(key, final[key]), value_of(key, best[key]) if key in best else "") for key in shown]


def facts(summary: Mapping[str, Any], run_dir: str) -> list[tuple[str, str]]:
    """What is worth knowing of a run that is over, besides its metrics."""
    time, pairs = summary.get("time") or {}, []
    skipped = f", {summary['skipped_steps']} skipped" if summary.get("skipped_steps") else ""
    pairs.append(("updates", f"{summary.get('updates') or 0:,}{skipped}, {summary.get('samples') or 0:,} samples"))
    speed = rate((summary.get("perf") or {}).get("samples_per_s"))
    spans = [f"trained {duration(time['train_s'])} of {duration(time['total_s'])}"] if time.get("train_s") else []
    if time.get("first_step_s"):
        spans.append(f"first step after {time['first_step_s']:.1f} s")
    pairs.append(("speed", ", ".join(part for part in (speed, *spans) if part)))
    ranks = summary.get("ranks") or []
    if ranks:
        peaks = [mb for rank in ranks for mb in numbers(rank["peak_memory_mb"])]
        low, high = f"{min(peaks):,.0f}", f"{max(peaks):,.0f}"
        of = f" per rank, {len(ranks)} ranks" if len(ranks) > 1 else f" per device, {len(peaks)} devices" * (len(peaks) > 1)
        pairs.append(("peak memory", (high if low == high else f"{low} to {high}") + " MB" + of))
    if summary.get("weights_sha256"):
        pairs.append(("weights", f"sha256 {summary['weights_sha256'][:16]}"))
    pairs.append(("run folder", relative(run_dir)))
    if summary.get("state") in ("stopped", "out_of_time"):
        sweep = job_facts.read(Path(run_dir)).sweep  # resume= would hand this job's checkpoint to every job
        again = f"hydra.sweep.dir={sweep}" if sweep else f"resume={run_dir}"
        pairs.append(("go on with", f"the same command and {relative(again)}"))
    return [(label, text) for label, text in pairs if text]


def numbers(told: Any) -> list[float]:
    """Of one device, or a map of several."""
    return list(told.values()) if isinstance(told, Mapping) else [told]


def progress(row: Mapping[str, Any]) -> dict[str, str]:
    """The last logged step by name: loss, lr, scale and skipped where they mean something, rate."""
    if not row:
        return {}
    parts = {"loss": f"loss {value_of('train/loss', row['train/loss'])}", "lr": f"lr {row['train/lr']:.3g}"}
    if row.get("train/loss_scale", 1) != 1:
        parts["scale"] = f"scale {row['train/loss_scale']:,.0f}"
    if row.get("train/skipped_steps"):
        parts["skipped"] = f"{row['train/skipped_steps']} skipped"
    return {**parts, "rate": rate(row.get("perf/samples_per_s"))}


class Remaining:
    """Seconds left, from the pace so far: evaluations and checkpoints count, since they will come again."""

    def __init__(self, total: int) -> None:
        self.total, self.first, self.since = total, 0, 0.0

    def begin(self, step: int, now: float) -> None:
        self.first, self.since = step, now

    def left(self, step: int, now: float) -> str:
        done = step - self.first
        if done < 2 or not self.since:
            return ""
        return f"{duration((now - self.since) / done * (self.total - step))} left"
