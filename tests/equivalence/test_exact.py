"""reduction=exact: weights, EMA, optimizer state and every logged number, bit for bit, on every hardware plan."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import DDP, DP, ONE, OPTIMIZERS, PRECISIONS, Plan, Trace, differences, job, traces

QUICK = [("fp32", "adamw", "tree"), ("bf16", "sgd", "tree"), ("fp16", "sgd", "tree"),
         ("fp32", "sgd", "bin64"), ("fp16", "adamw", "bin64")]  # fmt: skip
FULL = [*product(PRECISIONS, OPTIMIZERS, ["tree", "bin64"])]


def jobs(steps: int, cells: list[tuple[str, str, str]], *more: str) -> dict[str, Any]:
    return {
        "-".join(cell): job(*PRECISIONS[cell[0]], *OPTIMIZERS[cell[1]], "reduction=exact", f"reduction.method={cell[2]}",
                            f"steps={steps}", f"eval_every={steps}", *more)
        for cell in cells
    }  # fmt: skip


def on_one_process(folder: Path, made: dict[str, Any]) -> dict[str, Trace]:
    found = {name: ranks[0] for name, ranks in traces(folder, ONE, made, limit_s=3000).items()}
    kinds = {tuple(name.split("-")[:2]) for name in made}
    assert len({t.weights for t in found.values()}) >= len(kinds), "every precision and optimizer is a training of its own"
    for name, trace in found.items():
        assert (trace.skipped > 0) == name.startswith("fp16")
        assert trace.reruns > 0 or not name.startswith("fp16") or not name.endswith("bin64")
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    return on_one_process(tmp_path_factory.mktemp("one"), jobs(*SHORT))


SHORT = 3, QUICK, "data.samples=106"  # the third step is the epoch's tail
ALWAYS = (DP[0], DDP[1])  # the others, and 200 steps of all, in `make test-all`; uneven and idle ranks are below


@pytest.mark.parametrize("plan", [pytest.param(plan, id=plan.name, marks=() if plan in ALWAYS else pytest.mark.slow)
                                  for plan in (*DP, *DDP)])  # fmt: skip
def test_every_plan_trains_the_same_bits(tmp_path: Path, one: dict[str, Trace], plan: Plan) -> None:
    for name, ranks in traces(tmp_path, plan, jobs(*SHORT), limit_s=200).items():
        assert differences(one[name], ranks) == [], f"{plan.name}: {name}"


@pytest.mark.parametrize("plan", [DDP[2], pytest.param(DP[0], marks=pytest.mark.slow)], ids=lambda plan: plan.name)
def test_half_weights_train_the_same_bits(tmp_path: Path, plan: Plan) -> None:
    """Their gradients are summed in fp32 and handed to the masters as they are."""
    made = {
        f"{precision}-{method}": job(f"precision={precision}", "optimizer=sgd", "optimizer.lr=0.05", "reduction=exact",
                                     f"reduction.method={method}", "data.samples=62", "steps=3", "eval_every=3")
        for precision, method in (("O2", "tree"), ("O2", "bin64"), ("bf16_pure", "tree"))
    }  # fmt: skip
    one = {name: ranks[0] for name, ranks in traces(tmp_path, ONE, made).items()}
    for name, ranks in traces(tmp_path, plan, made).items():
        assert differences(one[name], ranks) == [], f"{plan.name}: {name}"


@pytest.fixture(scope="module")
def one_long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    return on_one_process(tmp_path_factory.mktemp("one_long"), jobs(200, FULL))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plan", [*DDP, *DP], ids=lambda plan: plan.name)
def test_every_plan_trains_the_same_bits_for_200_steps(tmp_path: Path, one_long: dict[str, Trace], plan: Plan) -> None:
    for name, ranks in traces(tmp_path, plan, jobs(200, FULL), limit_s=3500).items():
        assert differences(one_long[name], ranks) == [], f"{plan.name}: {name}"


@pytest.mark.parametrize(("method", "plans"), [
    ("tree", (DDP[2],)), ("bin64", (ONE,)),
    *(pytest.param(method, (ONE, *DDP[:3]), marks=pytest.mark.slow, id=f"{method}-every") for method in ("tree", "bin64")),
])  # fmt: skip
def test_a_run_goes_on_with_other_ranks_in_mid_epoch(tmp_path: Path, method: str, plans: tuple[Plan, ...]) -> None:
    made = job("reduction=exact", f"reduction.method={method}", "steps=5", "eval_every=5", "scheduler=constant",
               "checkpoint=default", "checkpoint.every=2", "checkpoint.keep=9")  # fmt: skip
    expected = traces(tmp_path, ONE, {"whole": made})["whole"][0]
    traces(tmp_path, DDP[1], {"begun": made})
    begun = tmp_path / DDP[1].name / "begun"
    for plan in plans:
        rest = {**made, "resume": str(begun), "checkpoint": {**made["checkpoint"], "load": "step-2"}}
        for rank in traces(tmp_path, plan, {"rest": rest})["rest"]:
            assert (rank.weights, rank.ema, rank.optimizer) == (expected.weights, expected.ema, expected.optimizer)


@pytest.mark.parametrize(("method", "plans"), [
    ("tree", (DP[0], DDP[2])), ("bin64", (DDP[5],)),
    *(pytest.param(method, (DP[0], DDP[0], DDP[2], DDP[5]), marks=pytest.mark.slow, id=f"{method}-every")
      for method in ("tree", "bin64")),
])  # fmt: skip
def test_float64_and_empty_shards_and_more_ranks_than_samples(tmp_path: Path, method: str, plans: tuple[Plan, ...]) -> None:
    """An epoch of 8 samples in windows of 6 one-sample shards: the last window fills two of them."""
    made = job("reduction=exact", f"reduction.method={method}", "data.samples=8", "batch.effective=6", "batch.micro=1",
               "batch.shard=null",
               "steps=4", "eval_every=4")  # fmt: skip
    made["model"] = {"name": "equivalence_float64"}
    expected = traces(tmp_path, ONE, {"all": made})["all"][0]
    for plan in plans:
        assert differences(expected, traces(tmp_path, plan, {"all": made})["all"]) == []


def test_exact_is_the_plain_sum_up_to_rounding(tmp_path: Path) -> None:
    made = {m: job("optimizer=sgd", "optimizer.lr=0.05", "steps=6", "eval_every=6", *r)
            for m, r in {"fast": (), "tree": ("reduction=exact", "reduction.method=tree"),
                         "bin64": ("reduction=exact", "reduction.method=bin64")}.items()}  # fmt: skip
    for each in made.values():
        each["model"] = {"name": "equivalence_plain"}  # no batch norm, every parameter in use
    found = {name: ranks[0].flat for name, ranks in traces(tmp_path, ONE, made).items()}
    for method in ("tree", "bin64"):
        assert torch.allclose(torch.tensor(found[method]), torch.tensor(found["fast"]), rtol=0, atol=1e-6)
        assert found[method] != found["fast"]
