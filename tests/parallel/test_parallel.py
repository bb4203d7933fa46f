"""DDP where parameters get no gradient, where ranks get no shard, and how gradients are added over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import on_ranks, rows, train
from precision_probes import PLAIN_SGD, QUIET, ConvNorm, SometimesUnused, data_of, model_of
from torch import nn

from isobatch.errors import ConfigError, JobFailed
from isobatch.parallel import DistributedDataParallel
from isobatch.parallel.completion import Usage
from isobatch.parallel.unused import without_gradient
from isobatch.runtime.distributed import Ranks

# 7 samples in windows of 5 and 2: with micro 2 the shards of a window hold 2, 2, 1 and then 1, 1 and none
SAMPLES = torch.tensor([[-1.0, 0.5], [2.0, 1.0], [-3.0, 1.5], [-4.0, 2.0], [-5.0, 2.5], [6.0, 3.0], [-7.0, 3.5]]) / 10
TARGETS = torch.arange(7.0).unsqueeze(1)
WORDS = (*QUIET, "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.weight_decay=0.1", "optimizer.lr=0.01", "loss=mse",
         "optimizer.decay_norms_and_biases=true", "steps=4", "eval_every=100", "batch.effective=5")  # fmt: skip


def probe() -> tuple[str, ...]:
    return (*WORDS, *model_of("sometimes_unused", lambda info: SometimesUnused()), *data_of("seven", SAMPLES, TARGETS))


def ranks_train(world_size: int, folder: Path, *words: str) -> list[Any]:
    def work(ranks: Any) -> Any:
        return train(folder, "parallel=ddp", *words, ranks=ranks)

    return on_ranks(world_size, folder, work)


@pytest.mark.parametrize(("world_size", "micro"), [
    *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 1), (3, 2))), (4, 2),
])  # fmt: skip
def test_unused_parameters_are_found_and_stay_without_gradient(tmp_path: Path, world_size: int, micro: int) -> None:
    """`never` is in no output, `second` in some shards only, and ranks idle in the tail (all but one of 4 with 2)."""
    words = (*probe(), f"batch.micro={micro}", "batch.shard=null")
    alone = train(tmp_path / "alone", *words)
    records = ranks_train(world_size, tmp_path / "together", *words)
    for record in records:
        for ours, theirs in zip(record.weights, alone.weights, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)
    never = slice(-3, None)  # decay and momentum must not touch what has no gradient
    assert records[0].weights[-1][never] == records[0].weights[0][never]


def test_a_parameter_may_get_its_first_gradient_late(tmp_path: Path) -> None:
    record = train(tmp_path, *probe(), "batch.effective=1")  # `second` sees its first input in step 2
    assert record.weights[0][3:6] != record.weights[1][3:6]


def test_without_unused_parameters_idle_ranks_add_nothing(tmp_path: Path) -> None:
    """W > V, with batch norm: 3 ranks, 2 shards; the running statistics are those of a single process."""
    images, labels = torch.randn(10, 1, 8, 8), torch.arange(10)
    words = (*QUIET, *model_of("conv_norm", lambda info: ConvNorm()), *data_of("ten", images, labels, 10), *PLAIN_SGD,
             "steps=2", "eval_every=100", "batch.effective=6", "batch.micro=3", "batch.shard=null")  # fmt: skip
    statistics: list[float] = []
    look = {"observe": lambda state, parts, data: statistics.append(state.model.norm.running_var.sum().item())}
    alone = train(tmp_path / "alone", *words, **look)

    def work(ranks: Any) -> Any:
        seen: list[float] = []
        record = train(tmp_path / "together", "parallel=ddp", *words, ranks=ranks,
                       observe=lambda state, parts, data: seen.append(state.model.norm.running_var.sum().item()))  # fmt: skip
        return record, seen

    for record, seen in on_ranks(3, tmp_path / "together", work):
        assert record.weights[-1] == pytest.approx(alone.weights[-1], abs=1e-6)
        assert seen == pytest.approx(statistics, rel=1e-5)


class Heads(nn.Module):
    """A head for inputs above 0, one for inputs below it. (N, 1) -> (N, 1)"""

    def __init__(self, spare: bool = False) -> None:
        super().__init__()
        self.above, self.below = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        if spare:
            self.spare = nn.Linear(1, 1, bias=False)
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = 0 * inputs
        for head, chosen in ((self.above, inputs > 0), (self.below, inputs < 0)):
            if bool(chosen.any()):  # a head that no sample of the shard asks for is not run
                output = output + head(inputs) * chosen
        return output


# the first shard of each rank uses both heads, so that a look at it finds nothing; in windows of 4 (shard v is window[v::2])
# later ones use one, another on each rank, or the same on both
HEADS = [1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 2.0, -2.0, 1.0, 3.0, 2.0, 1.0]
# in windows of 8 (shard v is window[v::4]) the last micro step of both ranks leaves the same head out, which the first one used
LAST = [1.0, 1.0, 1.0, 3.0, -1.0, 2.0, -1.0, 1.0] * 2
HEAD_WORDS = (*QUIET, "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.weight_decay=0.1", "optimizer.lr=0.1", "loss=mse",
              "optimizer.decay_norms_and_biases=true", "eval_every=1", "batch.micro=2", "batch.shard=null")  # fmt: skip


def heads(*words: str, of: list[float] = HEADS, spare: bool = False) -> tuple[str, ...]:
    inputs = torch.tensor(of).unsqueeze(1)
    data = data_of(f"heads{len(of)}", inputs, -inputs)
    return (*HEAD_WORDS, *model_of(f"heads{spare}", lambda info: Heads(spare)), *data, "sampler=sequential", *words)


@pytest.mark.parametrize("spare", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("strategy", "world_size", "effective"), [
    ("ddp", 3, 4),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in (("fsdp", 2, 4), ("ddp", 2, 4), ("ddp", 2, 8), ("ddp", 3, 12), ("fsdp", 2, 8))),
])  # fmt: skip
def test_samples_that_use_other_heads_train_as_in_one_process(tmp_path: Path, strategy: str, world_size: int, effective: int,
                                                              spare: bool) -> None:  # fmt: skip
    """Every step on every rank, the last one too, and the evaluations. `spare`, which nothing uses, keeps its weight."""
    words = heads(f"batch.effective={effective}", "steps=6", of=LAST if effective == 8 else HEADS, spare=spare)
    alone = train(tmp_path / "alone", *words)
    if strategy == "fsdp":
        words = (*words, "parallel.blocks=[]")

    def work(ranks: Any) -> Any:
        return train(tmp_path / "together", f"parallel={strategy}", *words, ranks=ranks)

    for record in on_ranks(world_size, tmp_path / "together", work):
        for ours, theirs in zip(record.weights, alone.weights, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)
        assert not spare or record.weights[-1][2] == 1.0, "decay has moved what has no gradient"
    assert rows(tmp_path / "together", "eval/loss") == pytest.approx(rows(tmp_path / "alone", "eval/loss"), rel=1e-5)


def test_false_on_a_model_with_unused_parameters_ends_before_an_update(tmp_path: Path) -> None:
    words = (*probe(), "batch.micro=1", "batch.shard=null", "parallel.find_unused_parameters=false", "eval_every=1")

    def work(ranks: Any) -> str:
        with pytest.raises(JobFailed) as failure:
            train(tmp_path, "parallel=ddp", *words, ranks=ranks)
        return str(failure.value)

    for text in on_ranks(2, tmp_path, work):
        assert "parallel.find_unused_parameters=auto" in text
    assert not list(tmp_path.glob("checkpoints/*")) and not (tmp_path / "metrics.jsonl").exists()


def test_a_rank_without_a_shard_is_no_unused_parameter(caplog: pytest.LogCaptureFixture) -> None:
    class Alone(Ranks):
        def all_reduce_later(self, tensor: torch.Tensor, op: str = "sum") -> Any:
            return SimpleNamespace(wait=lambda: None)

    usage = Usage(["a", "b"], Alone(), "parallel.find_unused_parameters")
    with caplog.at_level("INFO", "isobatch"):
        usage.end()
        usage.end()
        assert not caplog.messages
        usage.used[0] = 1
        usage.end()
        usage.end()
    assert "1 of 2 parameters (b)" in caplog.text


def test_what_is_completed_is_said_once_by_every_rank(tmp_path: Path) -> None:
    def work(ranks: Any) -> list[str]:
        import logging

        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("isobatch.parallel.completion")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        for name, words in (("never", probe()), ("later", heads("batch.effective=4", "steps=5", spare=True))):
            train(tmp_path / name, "parallel=ddp", *words, "batch.micro=1", "batch.shard=null", ranks=ranks)
        train(tmp_path / "all", "parallel=ddp", *QUIET, "model=mlp", "steps=3", ranks=ranks)
        asked = "parallel.find_unused_parameters=true"
        train(tmp_path / "quiet", "parallel=ddp", *probe(), "batch.micro=1", "batch.shard=null", asked, ranks=ranks)
        return lines

    told = on_ranks(2, tmp_path, work)
    assert told[0] == told[1] and len(told[0]) == 2
    assert "auto: some shards give no gradient for 4 of 6 parameters (second.weight, second.bias, never.weight" in told[0][0]
    assert "for 3 of 3 parameters (above.weight, below.weight, spare.weight): they add zeros" in told[0][1]


def test_looking_for_unused_parameters_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5))
    model.register_parameter("spare", nn.Parameter(torch.ones(2)))
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    missed = without_gradient(model, torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)))
    assert missed == [True, False, False, False, False]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())


def test_reentrant_checkpointing_hides_nothing_that_is_reported() -> None:
    from torch.utils.checkpoint import checkpoint

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, inputs):
            return checkpoint(self.inner, inputs.requires_grad_(), use_reentrant=True)

    assert without_gradient(Hidden(), torch.ones(2, 2)) == [False, False]


@pytest.mark.parametrize("words", [
    pytest.param(("reduce_dtype=float32",), marks=pytest.mark.slow), ("reduce_dtype=float16", "gradient_predivide=1"),
])  # fmt: skip
def test_gradients_added_otherwise_have_the_same_mean(tmp_path: Path, words: tuple[str, ...]) -> None:
    level = ("precision=O2", "precision.loss_scale=16")
    base = (*probe(), "batch.micro=1", "batch.shard=null", *level)
    alone = train(tmp_path / "alone", *base)
    for record in ranks_train(2, tmp_path / "together", *base, *(f"parallel.{word}" for word in words)):
        assert record.weights[-1] == pytest.approx(alone.weights[-1], abs=2e-3)
        assert record.weights[-1] != record.weights[0]


@pytest.mark.parametrize(
    ("level", "method"),
    [
        ("O2", "tree"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("O1", "bin64"), ("O2", "bin64"), ("O3", "tree"), ("bf16_pure", "bin64"))
        ),
    ],
)
def test_exact_reduction_is_exact_at_every_level(tmp_path: Path, level: str, method: str) -> None:
    images, labels = torch.randn(18, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(18) % 10
    words = (*QUIET, *model_of("conv_norm", lambda info: ConvNorm()), *data_of("eighteen", images, labels, 10),
             "optimizer=adamw", "steps=4", "eval_every=4", "batch.effective=10", "batch.micro=3",
             "batch.shard=null", "reduction=exact",
             f"reduction.method={method}", f"precision={level}", "max_grad_norm=1")  # fmt: skip
    words += ("precision.dtype=float16", "precision.loss_scale=4096") if level == "O1" else ()
    alone = train(tmp_path / "alone", *words)
    records = ranks_train(3, tmp_path / "together", *words)
    assert [record.weights for record in records] == [alone.weights] * 3


def test_contradictions_are_refused() -> None:
    for options, key in (({"reduce_dtype": "int8"}, "reduce_dtype"), ({"gradient_predivide": 0.0}, "gradient_predivide"),
                         ({"find_unused_parameters": "maybe"}, "find_unused_parameters")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"parallel.{key}"):
            DistributedDataParallel(**options)


def test_apexs_options_send_otherwise_and_give_the_same_gradients(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> dict[str, Any]:
        found = {}
        for name, options in (("plain", {"bucket_mb": 1e-4}), ("delayed", {"delay_allreduce": True}),
                              ("summed", {"gradient_average": False, "delay_allreduce": True})):  # fmt: skip
            torch.manual_seed(0)
            strategy = DistributedDataParallel(find_unused_parameters=False, **options)
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
            wrapped = strategy.wrap(model, ranks, torch.device("cpu"))
            for _ in range(3):  # DDP lays its buckets anew after the second
                model.zero_grad()
                output = wrapped(torch.full((2, 8), ranks.rank + 1.0))
                (output.sum() / 2 * strategy.loss_factor(ranks)).backward()
            gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters()]).tolist()
            found[name] = (gradients, wrapped._get_ddp_logging_data()["num_buckets_reduced"])
        return found

    for found in on_ranks(2, tmp_path, work):
        assert found["plain"][1] > 1 and found["delayed"][1] == found["summed"][1] == 1
        assert found["delayed"][0] == found["plain"][0] == pytest.approx(found["summed"][0])
        assert max(map(abs, found["plain"][0])) > 0.1
    for options, key in (({"gradient_average": False, "gradient_predivide": 2.0}, "gradient_predivide"),
                         ({"delay_allreduce": True, "bucket_mb": 1.0}, "bucket_mb")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"parallel.{key}"):
            DistributedDataParallel(**options)


def test_a_strategy_of_an_earlier_release_is_called_by_the_names_of_today() -> None:
    from isobatch.parallel.base import Single

    @dataclass(frozen=True)
    class Earlier(Single):
        def shard(self, *given: object) -> str:
            return "cut"

        def shard_count(self, replicas: int) -> int:
            return 3

    @dataclass(frozen=True)
    class Both(Earlier):
        def shard(self, *given: object) -> str:
            return "not this one"

        def partition(self, *given: object) -> str:  # type: ignore[override]
            return "this one"

    made: Any = Earlier()
    assert made.partition() == "cut" and made.parts_count(8) == 3
    assert Both().partition() == "this one"
