"""parallel=fsdp: the same training as one process, up to rounding, with weights, gradients and optimizer state in parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import FSDP, ONE, Plan, Trace, job, traces

SGD = ("optimizer=sgd", "optimizer.lr=0.05", "optimizer.weight_decay=0.01", "max_grad_norm=0.1")
LONG, SHORT = (
    ("steps=3", "eval_every=2", "data.samples=62"),
    ("steps=2", "eval_every=2", "data.samples=62"),
)  # to the tail, and beyond
UNEVEN, IDLE = FSDP  # six shards on four ranks: 2, 2, 1, 1; on seven: one rank has none, and five have none in the tail
WHOLE = ("parallel.reshard_after_forward=false", "parallel.reshard_between_micro_steps=false",
         "parallel.reduce_between_micro_steps=false")  # fmt: skip


def options(plan: Plan, name: str, *words: str) -> Plan:
    return replace(plan, name=f"{plan.name}_{name}", overrides=(*plan.overrides, *words))


def made_for(model: str, *words: str) -> dict[str, Any]:
    made = job(*SGD, *words)
    made["model"] = {"name": model}
    return made


def furthest(one: Trace, others: list[Trace]) -> float:
    """The largest difference of any weight, statistic or logged number."""
    expected, found = torch.tensor(one.flat + one.statistics), 0.0
    for other in others:
        found = max(found, (torch.tensor(other.flat + other.statistics) - expected).abs().max().item())
    for ours, theirs in zip(others[0].rows, one.rows, strict=True):
        assert ours.keys() == theirs.keys()
        found = max([found, *(abs(ours[key] - theirs[key]) for key in ours)])
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    jobs = {"float64": made_for("equivalence_float64", *LONG),
            "network": made_for("equivalence_probe", *SHORT)}  # fmt: skip
    return {name: found[0] for name, found in traces(tmp_path_factory.mktemp("alone"), ONE, jobs).items()}


def on(plan: Plan, folder: Path, model: str, *words: str) -> list[Trace]:
    return traces(folder, plan, {"job": made_for(model, *words)})["job"]


LATER = pytest.mark.slow  # make test-all


@pytest.mark.parametrize("plan", [
    *(pytest.param(plan, marks=LATER) for plan in (
        UNEVEN, IDLE, options(UNEVEN, "whole", *WHOLE), options(IDLE, "whole", *WHOLE, "parallel.blocks=[]"))),
    options(UNEVEN, "hybrid", "parallel.shard_size=2", "parallel.reduce_between_micro_steps=false"),
], ids=lambda plan: plan.name)  # fmt: skip
def test_the_same_as_one_process(tmp_path: Path, alone: dict[str, Trace], plan: Plan) -> None:
    """Weights, average, losses, gradient norms before clipping and evaluations, in float64."""
    found = on(plan, tmp_path, "equivalence_float64", *LONG)
    assert furthest(alone["float64"], found) <= 1e-7  # the losses are fp32 numbers
    weights = torch.tensor([trace.flat for trace in found], dtype=torch.float64)
    assert (weights - torch.tensor(alone["float64"].flat, dtype=torch.float64)).abs().max() <= 1e-12
    assert max(row.get("train/grad_norm", 0) for row in found[0].rows) > 0.1  # it is clipped
    assert len({(trace.weights, trace.ema, trace.optimizer) for trace in found}) == 1


@pytest.mark.parametrize("plan", [UNEVEN, pytest.param(IDLE, marks=LATER)], ids=lambda plan: plan.name)
def test_batch_norm_dropout_and_branches_that_only_some_shards_take(tmp_path: Path, alone: dict[str, Trace],
                                                                    plan: Plan) -> None:  # fmt: skip
    """Ranks without a shard touch neither statistics nor generators; a branch that no shard takes gets no decay."""
    found = on(plan, tmp_path, "equivalence_probe", *SHORT)
    assert furthest(alone["network"], found) <= 1e-5
