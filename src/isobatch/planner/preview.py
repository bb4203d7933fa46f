"""What a run calls before its first step: the world that is planned for, memory and time, as numbers and as words."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from isobatch import tasks
from isobatch.batch_plan import Batch
from isobatch.config import Config
from isobatch.console import Console
from isobatch.data import Splits
from isobatch.launch import devices
from isobatch.planner import cost, estimate, layers
from isobatch.planner.estimate import MB, Resident
from isobatch.planner.hooks import without_global_hooks
from isobatch.planner.trial import Trial, is_out_of_memory
from isobatch.runtime.distributed import Ranks
from isobatch.runtime.trees import tensors

log = logging.getLogger(__name__)


class AbsentRanks(Ranks):
    """A world that is planned for but not there: it counts as asked, and its only member talks to itself."""

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return tensor

    def agree(self, value: int) -> int:
        return value

    def broadcast_object(self, obj: Any) -> Any:
        return obj

    def gather_objects(self, obj: Any) -> list[Any] | None:
        return [obj]


def world(config: Config, ranks: Ranks) -> Ranks:
    """The ranks that the plan counts: those that are there, but for task=plan those that the config asks for."""
    if tasks.of(config).built != "plan" or ranks.world_size > 1:
        return ranks
    asked = config.parallel.num_processes or (1 if config.device == "cpu" else max(1, devices.count_gpus()))
    return AbsentRanks(0, asked, 0, asked)


@dataclass
class Preview:
    """`view`: label -> text for the plan; `record`: for plan.json; `notes`; `tables`: (head, rows): the network's layers, the
    cost model."""

    view: dict[str, str] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tables: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = field(default_factory=list)

    def show(self, console: Console) -> None:
        """The tables, after the plan."""
        for head, rows in self.tables:
            console.table(head, rows)


@without_global_hooks()
def preview(config: Config, model: nn.Module, splits: Splits, batch: Batch, device: torch.device, lanes: int = 1) -> Preview:
    """Memory without activations, which costs milliseconds; for task=plan all of it, by running a micro batch.

    Args:
        lanes: micro batches that run at the same time.
    """
    try:
        resident = estimate.resident(config, model, batch, lanes)
    except Exception as error:  # an estimate that fails must not stop a training (a model that cannot be copied, say)
        log.debug("no memory estimate: %s", error)
        return Preview()
    parts = {"weights": resident.weights, "half copy": resident.working, "gathered": resident.gathered,
             "gradients": resident.gradients, "optimizer": resident.optimizer, "average": resident.ema,
             "exact sums": resident.sums}  # fmt: skip
    listed = ", ".join(f"{name} {_mb(size)}" for name, size in parts.items() if size is None or size or name == "optimizer")
    found = Preview({"memory": f"{listed}: {_mb(resident.total)} MB per replica, without activations"})
    found.record["memory_mb"] = {name.replace(" ", "_"): None if size is None else round(size / MB, 3)
                                 for name, size in parts.items()}  # fmt: skip
    if getattr(config.model, "table", False):
        found.tables.append((layers.HEAD, layers.rows(Trial(config, model, splits, device))))
        found.record["layers"] = [dict(zip(layers.HEAD, row, strict=True)) for row in found.tables[0][1]]
    if tasks.of(config).built == "plan":
        _measure(found, listed, resident, config, model, splits, batch, device, lanes)
    return found


def _measure(found: Preview, listed: str, resident: Resident, config: Config, model: nn.Module, splits: Splits,
             batch: Batch, device: torch.device, lanes: int) -> None:  # fmt: skip
    try:
        trial = Trial(config, model, splits, device)
        saved = trial.saved(batch.micro)
        measured = None if config.cost.bandwidth_gb_s is None else trial.timed(batch.micro)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found.notes.append(f"a micro batch of {batch.micro} does not fit on {device}: lower batch.micro, or set it to auto")
        return
    activations = lanes * sum(s.nbytes for s in saved)
    all_gradients = batch.accumulation_steps > 1 or batch.num_replicas > 1
    inputs = sum(t.nbytes for t in tensors(trial.one)) * batch.micro * lanes
    highest = resident.total - resident.gradients + inputs + estimate.peak(saved, resident.gradients, all_gradients)
    highest += activations - activations // lanes
    held = f"a micro batch of {batch.micro}" if lanes == 1 else f"{lanes} shards of {batch.micro}"
    found.view["memory"] = (f"{listed}, activations {_mb(activations)} of {held}: "
                            f"{_mb(highest)} MB per replica at the peak")  # fmt: skip
    found.record["memory_mb"] |= {"activations": round(activations / MB, 3), "peak": round(highest / MB, 3)}
    if measured is None:
        return
    rows = cost.rows(batch, measured, resident.wire, config.cost)
    found.tables.append((cost.HEAD, cost.table(rows)))
    found.record["cost"] = {"forward_s": measured.forward_s, "backward_s": measured.backward_s,
                            "samples": measured.samples, "gradient_bytes": resident.wire.gradients,
                            "wire": asdict(resident.wire), "rows": [asdict(r) for r in rows]}  # fmt: skip
    found.notes.append(
        f"the table takes compute as measured here with a micro batch of {batch.micro} and {resident.wire.describe()} "
        f"in rings at {config.cost.bandwidth_gb_s:g} GB/s and {config.cost.latency_us:g} us; the last "
        "column lets the effective batch grow with the replicas, which is another training"
    )


def _mb(size: int | None) -> str:
    return "unknown" if size is None else f"{size / MB:,.1f}"
