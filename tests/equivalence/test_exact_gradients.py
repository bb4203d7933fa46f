"""reduction=exact with gradients that are missing, huge, tiny or not finite: as alone, or skipped alike on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import on_ranks
from plans import DDP, DP, ONE, differences, job, on_plan, traces
from torch import Tensor, nn

from isobatch import config as configuration
from isobatch import model as models
from isobatch.data import DataInfo
from isobatch.errors import ConfigError
from isobatch.run import Run
from isobatch.runtime.distributed import Ranks

METHODS = pytest.mark.parametrize("method", ["tree", "bin64"])


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


class Extreme(nn.Module):
    """In training, forward k multiplies its gradient with a factor that follows from the shard's own samples alone."""

    def __init__(self, info: DataInfo, factors: list[float]):
        super().__init__()
        self.first, self.last = nn.Linear(info.features, 8), nn.Linear(8, info.num_classes)
        self.factors = factors

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1)).relu()
        if self.training:
            pick = int(images.double().abs().sum().item() * 1000) % len(self.factors)
            x = Scaled.apply(x, self.factors[pick])
        return self.last(x)


@dataclass(frozen=True)
class ExtremeProbe:
    name: str = "equivalence_extreme"
    batch_norm: str = "shard"
    factors: Any = None

    def build(self, info: DataInfo) -> nn.Module:
        return Extreme(info, [float(f) for f in self.factors])


models.TABLE[ExtremeProbe.name] = ExtremeProbe


def extreme(method: str, factors: list[float], *overrides: str) -> dict[str, Any]:
    made = job("reduction=exact", f"reduction.method={method}", "optimizer=sgd", "optimizer.lr=1e-3", "steps=5",
               "eval_every=5", "on_nonfinite=skip", *overrides)  # fmt: skip
    made["model"] = {"name": ExtremeProbe.name, "factors": [str(f) for f in factors]}
    return made


@pytest.mark.parametrize(("method", "plans"), [
    ("tree", (DDP[0],)), ("bin64", (DP[1],)),
    *(pytest.param(method, (*DP[1:], DDP[0], DDP[2], DDP[5]), marks=pytest.mark.slow, id=f"{method}-every")
      for method in ("tree", "bin64")),
])  # fmt: skip
def test_extreme_gradients_train_the_same_bits_or_are_skipped_alike(tmp_path: Path, method: str, plans: Any) -> None:
    made = {
        "far apart": extreme(method, [1e30, 1e-30, 1.0]),
        "subnormal": extreme(method, [1e-38, 1e-42, 0.0]),
        "zero": extreme(method, [0.0]),
        "some infinite": extreme(method, [1.0] * 9 + [float("inf")]),
        "not a number": extreme(method, [1.0] * 9 + [float("nan")]),
        "exploding": extreme(method, [1.0] * 9 + [1e6]),
    }
    one = {name: ranks[0] for name, ranks in traces(tmp_path, ONE, made).items()}
    assert one["zero"].skipped == 0 and 0 < one["some infinite"].skipped < 5 and 0 < one["not a number"].skipped < 5
    if method == "bin64":
        assert one["exploding"].reruns > 1
    for plan in plans:
        for name, ranks in traces(tmp_path, plan, made).items():
            assert differences(one[name], ranks) == [], f"{plan.name}: {name}"


@METHODS
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_parameter_without_a_gradient_has_none_on_any_rank(tmp_path: Path, method: str, world_size: int) -> None:
    """So that weight decay leaves it alone, as it does in one process."""
    made = job("reduction=exact", f"reduction.method={method}", "optimizer=sgd", "steps=2", "eval_every=2")

    def work(ranks: Ranks) -> tuple[bool, bool, bool]:
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        run = Run(configuration.load(on_plan(made, DDP[0] if world_size > 1 else ONE)), folder, ranks)
        run.build()
        assert run.loop is not None
        model = run.loop.state.model
        before = model.never.weight.detach().clone()
        run.perform()
        run.finish("completed", None)
        unchanged = torch.equal(model.never.weight, before)
        return unchanged, model.never.weight.grad is None, model.head.weight.grad is not None

    for found in [work(Ranks())] if world_size == 1 else on_ranks(world_size, tmp_path, work):
        assert found == (True, True, True)


def test_exact_says_what_it_cannot_sum(tmp_path: Path) -> None:
    made = job("reduction=exact", "steps=1")
    run = Run(configuration.load(made), tmp_path, Ranks())

    class TwoDevices:
        name = "dp"

        def lane_devices(self, device: torch.device) -> list[torch.device]:
            return [torch.device("cuda", 0), torch.device("cuda", 1)]

    from isobatch.reduction.exact import build

    with pytest.raises(ConfigError, match="parallel=ddp"):
        build(run.config.reduction, None, TwoDevices(), None, Ranks(), torch.device("cpu"))  # type: ignore[arg-type]
