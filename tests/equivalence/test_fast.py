"""reduction=fast: plans agree up to rounding, within stated tolerances, with one gradient all-reduce a window."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from harness import on_ranks
from plans import DDP, DP, ONE, Plan, job, on_plan, trace, traces

from isobatch.parallel import wrappers
from isobatch.runtime.distributed import Ranks

FLOAT64, FLOAT32 = ("equivalence_float64", 1e-12, 20), ("equivalence_plain", 1e-5, 50)


@pytest.mark.parametrize(("model", "tolerance", "steps", "plans"), [
    (*FLOAT64[:2], 8, (DDP[5],)), (*FLOAT32[:2], 20, (DP[0],)),  # fewer steps; all of them in `make test-all`
    *(pytest.param(*numbers, (DP[0], DDP[0], DDP[2], DDP[5]), marks=pytest.mark.slow) for numbers in (FLOAT64, FLOAT32)),
])  # fmt: skip
def test_plans_agree_up_to_rounding(tmp_path: Path, model: str, tolerance: float, steps: int, plans: tuple[Plan, ...]) -> None:
    made = job("optimizer=sgd", "optimizer.lr=0.05", f"steps={steps}", f"eval_every={steps}")
    made["model"] = {"name": model}
    expected = torch.tensor(traces(tmp_path, ONE, {"all": made})["all"][0].flat, dtype=torch.float64)
    begin = torch.tensor(traces(tmp_path / "begin", ONE, {"all": {**made, "steps": 1}})["all"][0].flat, dtype=torch.float64)
    assert (expected - begin).abs().max() > 0.01
    for plan in plans:
        for rank in traces(tmp_path, plan, {"all": made})["all"]:
            distance = (torch.tensor(rank.flat, dtype=torch.float64) - expected).abs().max().item()
            assert distance <= tolerance, plan.name


def test_gradients_are_reduced_once_per_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job("optimizer=sgd", "steps=5", "eval_every=5")
    made["model"] = {"name": "equivalence_plain"}
    original = wrappers.distributed_data_parallel
    calls: Counter[int] = Counter()

    def counted(model, device, options, *rest):
        wrapped = original(model, device, options, *rest)

        def hook(state, bucket):  # no annotations: torch wants them as objects, and here they are text
            calls[bucket.index()] += 1
            done = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
            return done.then(lambda future: future.value()[0])

        wrapped.register_comm_hook(None, hook)
        return wrapped

    monkeypatch.setattr(wrappers, "distributed_data_parallel", counted)

    def work(ranks: Ranks) -> dict[int, int]:
        trace(on_plan(made, DDP[0]), tmp_path / "run", ranks)
        return dict(calls)

    assert on_ranks(2, tmp_path / "ranks", work) == [{0: 5}, {0: 5}]  # three micro steps a window on each rank
