"""summary.json: how a run ended, what it reached, how fast and with how much memory; the same keys on every ending."""

from __future__ import annotations

import os
import platform
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

from isobatch.run_folder import layout
from isobatch.runtime import accelerator
from isobatch.runtime.device_use import by_device
from isobatch.runtime.dtensor import in_parts
from isobatch.train.state import weights_sha256

if TYPE_CHECKING:
    from isobatch.runtime.distributed import Ranks
    from isobatch.train.loop import Loop


class Summarized(Protocol):
    """What a summary is told of a run; `loop` is None where it ended before its first step could be taken."""

    ranks: Ranks
    started: float
    loop: Loop | None

    @property
    def plan(self) -> dict[str, Any]: ...

    @property
    def device(self) -> torch.device: ...


def summarize(run: Summarized, ending: str, error: BaseException | None) -> dict[str, Any]:
    """The summary of a run that ended as `ending` (layout.ENDED, stopped or failed). When ENDED, a collective."""
    mine = this_rank(run)
    # a rank that failed cannot count on the others: only a run that ended together collects from all
    ranks = run.ranks.gather_objects(mine) if ending in layout.ENDED else [mine]
    summary: dict[str, Any] = {
        "state": ending, "steps": 0, "updates": 0, "skipped_steps": 0, "samples": 0, "plan": run.plan or None,
        "final": {}, "best": {}, "weights_sha256": None,
        "time": {"total_s": time.time() - run.started, "train_s": 0.0, "first_step_s": None},
        "perf": {"samples_per_s": None}, "ranks": ranks,
        "error": None if error is None else " ".join(str(error).split()) or type(error).__name__,
    }  # fmt: skip
    if run.loop is not None:
        loop, state = run.loop, run.loop.state
        final = {**loop.last_train, **loop.last_eval}
        summary |= {
            "steps": state.step, "updates": state.update, "skipped_steps": state.skipped_steps, "samples": state.samples,
            "final": {key: value for key, value in final.items() if key.startswith(("train/", "eval/"))},
            "best": {metric: best["value"] for metric, best in state.best.items()},
            "weights_sha256": digest(run, ending),
            "perf": {"samples_per_s": loop.samples_per_s()},
        }  # fmt: skip
        if audited := loop.chain.state_dict():
            summary["audit"] = audited
        if loop.ending is not None:
            summary["reason"] = loop.ending.reason
        summary["time"]["train_s"] = loop.clock.train_s
        if loop.clock.first_step is not None:
            summary["time"]["first_step_s"] = loop.clock.first_step - run.started
    return summary


def digest(run: Summarized, ending: str) -> str | None:
    """weights_sha256 on the main rank. Of weights that are spread over ranks only when all of them are here."""
    assert run.loop is not None
    model = run.loop.state.model
    if ending != "failed":
        return weights_sha256(model) if run.ranks.is_main or in_parts(model) else None
    try:
        run.loop.parts.statistics.attach()
        return weights_sha256(model) if run.ranks.is_main and not in_parts(model) else None
    except Exception:  # the device may be what failed: the summary is written without it
        return None


def this_rank(run: Summarized) -> dict[str, Any]:
    use = run.loop.use if run.loop is not None else None
    devices, peaks = use.devices if use else [run.device], list[float | None]()
    for device in devices:
        try:
            peaks.append(accelerator.peak_memory_mb(device))
        except Exception:  # of a device that failed
            peaks.append(None)
    busy = use.busy() if use else [None]
    known = {"busy_percent": by_device(devices, busy)} if any(share is not None for share in busy) else {}
    return {"rank": run.ranks.rank, "local_rank": run.ranks.local_rank, "pid": os.getpid(), "host": platform.node(),
            "device": accelerator.name(run.device), "peak_memory_mb": by_device(devices, peaks), **known}  # fmt: skip
