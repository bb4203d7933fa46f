"""The first shard is run twice where equal bits are promised: what that finds, and that a training never notices."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from harness import on_ranks, plain, summary
from plans import BASE, Plan, differences, job, trace, traces
from torch import Tensor, nn

from isobatch import model as models
from isobatch import run
from isobatch.audit import repeat
from isobatch.audit.diagnosis import pair
from isobatch.data import DataInfo
from isobatch.errors import JobFailed
from isobatch.runtime.distributed import Ranks

STALE = torch.zeros(4096)  # stands for memory that somebody used before: what lies in it is not of this shard
CALLS = count(1)  # outside any module, so that nothing puts it back


class ReadsStale(nn.Module):
    """Adds memory that nobody wrote for it; leaves its own values there, as a kernel with scratch does."""

    def forward(self, x: Tensor) -> Tensor:
        stale = STALE[: x[0].numel()].view_as(x[0]).clone()
        STALE[: x[0].numel()] = float(next(CALLS))
        return x + (1e-1 * stale).to(x.dtype)


class OtherGradient(torch.autograd.Function):
    """The same values in every forward, another gradient in every backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (1 + 2.0 ** -(next(CALLS) % 16))


class ReadsStaleBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return OtherGradient.apply(x)


class KeepsStale(nn.Module):
    """The same values and gradients, other statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.kept.fill_(next(CALLS))
        return x


class Faulty(nn.Module):
    def __init__(self, info: DataInfo, fault: nn.Module):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(info.in_chans, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3), fault, nn.Conv2d(4, 4, 3))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, info.num_classes))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(self.stem(images)).mean((2, 3)))


FAULTS = {"none": nn.Identity, "forward": ReadsStale, "backward": ReadsStaleBackward, "statistics": KeepsStale}


@dataclass(frozen=True)
class FaultyProbe:
    name: str = "repeat_faulty"
    batch_norm: str = "shard"
    fault: str = "none"

    def build(self, info: DataInfo) -> nn.Module:
        return Faulty(info, FAULTS[self.fault]())


models.TABLE[FaultyProbe.name] = FaultyProbe
SHORT = (*BASE, "steps=2", "eval_every=2")


def faulty(fault: str, *words: str) -> dict[str, Any]:
    return {**plain(*SHORT, *words), "model": {"name": FaultyProbe.name, "fault": fault}}


@pytest.mark.parametrize(("words", "promise"), [
    (("reduction=exact",), "reduction=exact"),
    (("deterministic=true",), "deterministic=true"),
    (("sweep.tolerance=0.0",), "sweep.tolerance=0"),
    (("reduction=exact", "reduction.method=bin64", "precision=O2"), "reduction=exact"),
])  # fmt: skip
def test_a_module_that_reads_what_nobody_wrote_ends_the_run_before_the_first_update(tmp_path: Path, words, promise) -> None:
    with pytest.raises(JobFailed) as error:
        run.run_job(faulty("forward", *words), tmp_path, Ranks())
    line = str(error.value)
    assert line.startswith(f"{promise} cannot hold: the first shard of step 1, run twice, gives two results; "
                           "body.1 (ReadsStale) is the first module whose output differs: "), line  # fmt: skip
    assert "\n" not in line and "precision=fp32" in line and "ONEDNN_MAX_CPU_ISA=AVX2" in line
    found = summary(tmp_path)
    assert (found["state"], found["steps"], found["updates"]) == ("failed", 0, 0) and found["error"] == line
    assert error.value.exit_code == 1


def test_one_whose_gradient_alone_differs_is_found_by_the_first_gradient_that_does(tmp_path: Path) -> None:
    with pytest.raises(JobFailed) as error:
        run.run_job(faulty("backward", "reduction=exact"), tmp_path, Ranks())
    # the backward comes from the head: body.2 is the same still, the gradient that body.1 hands on to body.0 is not
    assert "; body.0 (Conv2d) is the first module whose gradient differs (" in str(error.value)
    assert " values of body.0." in str(error.value)


def test_statistics_alone_are_looked_at_too(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"; body\.1 \(KeepsStale\) is the first module whose statistics differ"):
        run.run_job(faulty("statistics", "reduction=exact"), tmp_path, Ranks())


def test_nobody_is_asked_where_nothing_is_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat.Repeat, "_run", lambda *args: pytest.fail("a shard was run twice"))
    run.run_job(faulty("forward"), tmp_path, Ranks())
    assert summary(tmp_path)["state"] == "completed"


def test_a_sweep_with_a_tolerance_is_told_of_less_and_stopped_by_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run.run_job(faulty("backward", "sweep.tolerance=1.0"), tmp_path / "much", Ranks())
    assert "body.0 (Conv2d) is the first module" in caplog.text and "sweep.tolerance allows as much" in caplog.text
    assert summary(tmp_path / "much")["state"] == "completed"
    with pytest.raises(JobFailed, match=r"sweep\.tolerance=1e-09 cannot hold"):
        run.run_job(faulty("backward", "sweep.tolerance=1e-9"), tmp_path / "little", Ranks())


@pytest.mark.parametrize(("strategy", "words"), [
    ("ddp", ("reduction=exact",)),
    *(pytest.param(strategy, ("deterministic=true",), marks=pytest.mark.slow) for strategy in ("ddp", "fsdp")),
])  # fmt: skip
def test_all_ranks_end_with_the_same_line(tmp_path: Path, strategy: str, words: tuple[str, ...]) -> None:
    def work(ranks: Ranks) -> str:
        # of 3 shards on 4 ranks: the last has none; rank 1 alone meets the fault, but where weights are gathered
        fault = "forward" if ranks.rank == 1 else "none"
        with pytest.raises(JobFailed) as error:
            run.run_job(faulty(fault, *words, f"parallel={strategy}", "batch.effective=24"), tmp_path / "run", ranks)
        return str(error.value)

    lines = on_ranks(4, tmp_path / "ranks", work)
    assert len(set(lines)) == 1
    assert "gives two results on rank " in lines[0] and "is the first module whose" in lines[0]
    assert strategy != "ddp" or "on rank 1; body.1 (ReadsStale) is the first module whose output differs" in lines[0]


# -- no trace -----------------------------------------------------------------------------------------------------------
WORDS = {
    "exact": ("reduction=exact",),
    "bin64 fp16": ("reduction=exact", "reduction.method=bin64", "precision=amp", "precision.dtype=float16",
                   "precision.loss_scale=2097152"),
    "half weights": ("deterministic=true", "precision=O2", "precision.dtype=bfloat16"),
    "clipped": ("deterministic=true", "optimizer=adamw", "max_grad_norm=0.5", "on_nonfinite=skip"),
    "tolerance": ("sweep.tolerance=1e-3", "augment.name=none"),
    "views": ("loss=jsd", "reduction=exact", "batch.micro=11", "batch.shard=null"),
    "taught": ("loss=distill", "loss.teacher.arch=test_resnet", "deterministic=true"),
}  # fmt: skip


@cache
def of(name: str) -> dict[str, Any]:
    """Composed where it is first asked for: every worker of the tests imports this file."""
    return job(*SHORT, *WORDS[name])


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


def with_and_without(folder: Path, plan: Plan, jobs: dict[str, Any]) -> tuple[Any, Any, int]:
    """The traces of `jobs` on `plan` with the question and without, and how often a shard was run for it (here)."""
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        original = repeat.Repeat._run
        patch.setattr(repeat.Repeat, "_run", lambda *args: calls.append(1) or original(*args))
        asked, left = traces(folder / "asked", plan, jobs), generators()
        patch.setattr(repeat, "wanted", lambda *args: None)
        unasked = traces(folder / "unasked", plan, jobs)
        assert left == generators()
        return asked, unasked, len(calls)


@pytest.mark.parametrize("plan", [
    pytest.param(Plan("one"), id="one"),
    pytest.param(Plan("dp2", ("parallel=dp", "parallel.replicas=2")), id="dp2", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_training_is_the_same_with_and_without_the_question(tmp_path: Path, plan: Plan) -> None:
    asked, unasked, calls = with_and_without(tmp_path, plan, {name: of(name) for name in WORDS})
    assert calls == 2 * len(WORDS)
    for name in WORDS:
        assert not differences(unasked[name][0], asked[name]), name
        assert unasked[name][0].statistics == asked[name][0].statistics, name


@pytest.mark.parametrize("plan", [
    pytest.param(Plan("ddp7", ("parallel=ddp",), 7), id="ddp7", marks=pytest.mark.slow),  # the last has no shard
    pytest.param(Plan("ddp2 looks", ("parallel=ddp", "parallel.find_unused_parameters=true"), 2), id="ddp2 looks",
                 marks=pytest.mark.slow),
    pytest.param(Plan("fsdp4", ("parallel=fsdp",), 4), id="fsdp4", marks=pytest.mark.slow),
])  # fmt: skip
def test_so_are_several_ranks(tmp_path: Path, plan: Plan) -> None:
    few = ("taught", "bin64 fp16", "tolerance", "views") if plan.num_ranks == 2 else ("taught",)
    names = [n for n in WORDS if n not in few and not (plan.name == "fsdp4" and of(n)["reduction"]["name"] == "exact")]
    asked, unasked, _ = with_and_without(tmp_path, plan, {name: of(name) for name in names})
    for name in names:
        for rank, (one, other) in enumerate(zip(unasked[name], asked[name], strict=True)):
            assert not differences(one, [other]), (name, rank)


def test_a_resumed_run_is_asked_again_and_stays_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {**job(*SHORT, "reduction=exact", "steps=4", "scheduler=constant"),
            "checkpoint": plain("checkpoint.every=2")["checkpoint"]}  # fmt: skip
    whole = trace(made, tmp_path / "whole", Ranks())
    made = {**made, "steps": 2}
    trace(made, tmp_path / "half", Ranks())
    steps: list[int] = []
    original = repeat.Repeat._ask
    monkeypatch.setattr(repeat.Repeat, "_ask", lambda self, state, parts, data, first: steps.append(data.window.step)
                        or original(self, state, parts, data, first))  # fmt: skip
    resumed = trace({**made, "steps": 4, "resume": str(tmp_path / "half")}, tmp_path / "rest", Ranks())
    assert steps == [2]
    assert (resumed.weights, resumed.ema, resumed.optimizer) == (whole.weights, whole.ema, whole.optimizer)


class Remembers(nn.Module):
    """State of every kind that a forward may change."""

    def __init__(self, info: DataInfo):
        super().__init__()
        self.layer = nn.Linear(info.features, info.num_classes)
        self.calls, self.scale = 0, 1.0
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(3))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        self.scale *= 0.9
        self.seen += 1
        self.replaced = self.replaced + random.random() + numpy.random.rand()
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(2))
        self.late += 1  # one that was left behind would be counted on
        images -= 0.1  # a model may spoil its input
        return self.layer(images.flatten(1)) * self.scale + self.replaced.mean() + self.late.mean()


@dataclass(frozen=True)
class RemembersProbe:
    name: str = "repeat_remembers"
    batch_norm: str = "shard"

    def build(self, info: DataInfo) -> nn.Module:
        return Remembers(info)


models.TABLE[RemembersProbe.name] = RemembersProbe


def test_what_a_model_keeps_for_itself_is_put_back(tmp_path: Path) -> None:
    words = (*SHORT, "deterministic=true", "steps=2")  # no average of a buffer that comes late
    made = {**plain(*words), "model": {"name": RemembersProbe.name}, "ema": plain("ema=none")["ema"]}
    asked, unasked, calls = with_and_without(tmp_path, Plan("one"), {"it": made})
    assert calls == 2
    assert not differences(unasked["it"][0], asked["it"])
    assert unasked["it"][0].statistics == asked["it"][0].statistics


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.number, self.word = 1, "as it was"
        for name in ("constant", "counted", "replaced", "removed"):
            self.register_buffer(name, torch.zeros(2))
        self.register_buffer("empty", None)


def test_every_kind_of_what_a_step_changes_is_put_back() -> None:
    """Each of these lines is there for one line of `unchanged`."""
    module, criterion, master = Holder(), Holder(), nn.Parameter(torch.ones(2))
    own = torch.Generator().manual_seed(3)
    parts: Any = SimpleNamespace(working=SimpleNamespace(module=module), criterion=criterion)
    state: Any = SimpleNamespace(parameters=[master])
    module.weight.grad, kept = torch.full((2,), 5.0), {}
    for each in (module, criterion):
        kept[each] = dict(each._buffers)
    gradient, drawn, seeded = module.weight.grad, generators(), own.get_state()
    with repeat.unchanged(state, parts, [own]):
        torch.rand(3, generator=own)
        _ = torch.rand(3), random.random(), numpy.random.rand()
        for parameter in (module.weight, module.other, master):
            parameter.grad = torch.zeros(2)
        for each in (module, criterion):
            each.number, each.word = 2, "another"
            each.counted += 1
            each.replaced = each.replaced + 1
            each.removed, each.empty = None, torch.ones(1)
            each.register_buffer("late", torch.ones(1))
    assert module.weight.grad is gradient and gradient.tolist() == [5.0, 5.0] and module.other.grad is None is master.grad
    assert drawn == generators() and torch.equal(seeded, own.get_state())
    for each in (module, criterion):
        assert {name: id(b) for name, b in each._buffers.items()} == {name: id(b) for name, b in kept[each].items()}
        assert all(b is None or b.tolist() == [0.0, 0.0] for b in each._buffers.values()) and each.constant._version == 0
        assert (each.number, each.word) == (1, "as it was")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_so_is_a_compiled_one_and_nothing_is_compiled_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    def compiled(folder: Path, ranks: Ranks) -> tuple[Any, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found = trace(faulty("none", "deterministic=true", "compile=true"), folder, ranks)
        return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def both(ranks: Ranks) -> Any:
        asked = compiled(tmp_path / "asked", ranks)
        monkeypatch.setattr(repeat, "wanted", lambda *args: None)
        return asked, compiled(tmp_path / "unasked", ranks)

    # in a process of its own: a compiled backward starts threads of autograd, after which nobody can fork
    (((asked, graphs), (unasked, as_before)),) = on_ranks(1, tmp_path / "ranks", both)
    assert not differences(unasked, [asked]) and graphs == as_before > 0


# -- the comparison -----------------------------------------------------------------------------------------------------
def test_equal_bits_by_hand() -> None:
    one = torch.tensor([1.0, -2.0, torch.nan])
    assert pair(one, one.clone()) is None
    assert pair(one, -one.neg()) is None
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert pair(quiet[:1], quiet[1:]) is None  # one NaN is as good as another
    assert pair(torch.tensor([0.0]), torch.tensor([-0.0])) is not None
    assert pair(torch.tensor([4.0, 1.0]), torch.tensor([4.0, 2.0])) == (1.0, 4.0, 1, 2)
    assert pair(torch.tensor([1.0]), torch.tensor([torch.nan])) == (torch.inf, 1.0, 1, 1)
    assert pair(torch.ones(3), None) == pair(None, torch.ones(3)) == (torch.inf, torch.inf, 3, 3)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64, torch.bool):
        value = torch.tensor([1, 0, 1]).to(dtype)
        assert pair(value, value.clone()) is None and pair(value, 1 - value if dtype != torch.bool else ~value) is not None
    assert pair(torch.zeros(0), torch.zeros(0)) is None
