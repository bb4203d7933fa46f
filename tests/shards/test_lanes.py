"""Several shards of an exact sum at the same time: every bit as if they had been run one after another."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from checkpoint_tools import rewrite, same, state_of, train_and_stop, training
from harness import BASE, plain, train, train_ranks
from test_apart import CPU, DRAWS, batch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isobatch
from isobatch import run
from isobatch.batch_plan import Batch
from isobatch.config import load
from isobatch.data.loader import WorkerSource
from isobatch.data.samples import Request
from isobatch.errors import JobFailed
from isobatch.extend.registry import register
from isobatch.given import Given
from isobatch.reduction.elements import ByElements
from isobatch.runtime.distributed import Ranks
from isobatch.shards.layout import Layout
from isobatch.shards.own import Own
from isobatch.train import crews
from isobatch.train import lanes as lanes_
from isobatch.train.crews import undisturbed
from isobatch.train.lane import Uncached
from isobatch.train.unseen import Reached

# six shards of four a window, and a tail of three and two samples a shard
SMALL = (*BASE, "reduction=exact", "epochs=null", "steps=3", "eval_every=3", "log_every=1", "data=synthetic", "data.samples=63",
         "data.eval_samples=4", "data.image_size=4", "batch.effective=24", "batch.shard=4", "checkpoint.every=3")  # fmt: skip
RICH = (*SMALL, "model.norm=true", "model.drop_rate=0.3")


pytestmark = pytest.mark.usefixtures("tables_as_before")


def in_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("name", DRAWS)
def test_a_thread_draws_what_the_default_generator_would_give(name: str) -> None:
    x = batch(Layout((8,)), 4, 3, 2)
    torch.default_generator.manual_seed(5)
    expected = DRAWS[name](x.clone()), torch.rand(2)
    torch.default_generator.manual_seed(9)
    before = torch.default_generator.get_state()

    def work() -> Any:
        own = Own()
        own.generator.manual_seed(5)
        with own.drawing():
            return DRAWS[name](x.clone()), torch.rand(2)

    found = in_a_thread(work)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(torch.default_generator.get_state(), before)


class Watched(contextlib.AbstractContextManager[None]):
    """A lock that says whether it is held."""

    held = entered = 0

    def __enter__(self) -> None:
        self.held, self.entered = 1, self.entered + 1

    def __exit__(self, *error: object) -> None:
        self.held = 0


def test_the_default_generator_is_one_threads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = Watched()
    for place in ("shards.own", "train.crews", "data.loader"):
        monkeypatch.setattr(f"isobatch.{place}.DRAWING", lock)
    with Own().drawing():
        torch.randn_like(torch.zeros(3))
        F.dropout(torch.ones(3), 0.5)  # from the thread's own, beside others
    assert lock.entered == 1
    before = torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()
    prepared = undisturbed(lambda *_: (lock.held, torch.rand(1), numpy.random.rand(), random.random()))
    assert prepared is not None and prepared()[0]
    after = torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]

    class Reads:
        def isolated(self, request: Any) -> Any:
            return lock.held

    source = WorkerSource.__new__(WorkerSource)
    source.samples, source.loader = Reads(), None  # type: ignore[assignment]
    assert list(source._read(iter([Request(0, torch.arange(2))]))) == [1] and not lock.held


def rows(folder: Path) -> list[str]:
    """metrics.jsonl without times."""
    timed = ("perf/", "time")
    return [str({k: v for k, v in isobatch.read(folder)[i].items() if not k.startswith(timed)})
            for i in range(len(isobatch.read(folder)))]  # fmt: skip


def at_once(folder: Path, *words: str, **more: Any) -> int:
    """Train; the largest number of shards that were under way at the same time."""
    seen, original = [0], lanes_.LaneSteps._land

    def land(self: Any, parts: Any) -> None:
        seen.append(len(self.under_way))
        original(self, parts)

    lanes_.LaneSteps._land = land  # type: ignore[method-assign]
    try:
        train(folder, *words, **more)
    finally:
        lanes_.LaneSteps._land = original  # type: ignore[method-assign]
    return max(seen)


def assert_same(tmp_path: Path, words: tuple[str, ...], lanes: tuple[int, ...] = (2, 4)) -> None:
    """Whole trainings of three windows, one shard and several at a time: weights, statistics, optimizer, losses, norms."""
    train(tmp_path / "1", *words, "threads=1")
    expected, told = training(state_of(tmp_path / "1")), rows(tmp_path / "1")
    for count in lanes:
        folder = tmp_path / str(count)
        assert at_once(folder, *words, f"threads={count}") == count + 1, "no lanes"
        assert same(training(state_of(folder)), expected) and rows(folder) == told, f"{count} lanes"


KINDS = {
    "tree": (),
    "bin64": ("reduction.method=bin64", "max_grad_norm=0.5"),
    "audited": ("audit=replay", "audit.every=1", "precision=bf16"),
    "half a window at once": ("batch.micro=8",),
    "sharpness": ("optimizer.sam=0.05", "optimizer=sgd"),
    "half masters": ("precision=O2", "precision.dtype=bfloat16", "ema=ema", "ema.decay=0.9"),
    "two replicas": ("parallel=dp", "parallel.replicas=2", "batch.micro=12"),
}
ALWAYS = ("tree", "bin64", "audited")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in ALWAYS else pytest.mark.slow) for kind in KINDS])
def test_a_training_is_the_same_with_any_number_of_lanes(tmp_path: Path, kind: str) -> None:
    assert_same(tmp_path, (*RICH, *KINDS[kind]), (2, 4) if kind == "tree" else (2,))


class Own_(nn.Module):
    """A small network with a place for anything: `part(x)` is called in every forward."""

    def __init__(self, part: Callable[[Tensor], Tensor] | nn.Module, spoils: bool = False):
        super().__init__()
        self.spoils = spoils
        self.body, self.norm, self.head = nn.Linear(48, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        if self.spoils:
            x.mul_(1.5)
        return self.head(F.dropout(self.part(self.norm(self.body(x.flatten(1)))), 0.2, self.training))


class Counting(nn.Module):
    """Counts its calls in an attribute, a list, a buffer, a list in a dict, an object, or an iterator."""

    def __init__(self, where: str):
        super().__init__()
        self.where, self.calls, self.seen, self.held = where, 0, [], {"calls": [0]}
        self.object, self.numbers = SimpleNamespace(calls=0), itertools.count()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return x
        if self.where == "buffer":
            self.count += 1
        elif self.where == "list":
            self.seen.append(1)
        elif self.where == "nested":
            self.held["calls"][0] += 1
        elif self.where == "object":
            self.object.calls += 1
        elif self.where == "iterator":
            next(self.numbers)
        else:
            self.calls += 1
        return x


def noisy(x: Tensor) -> Tensor:
    return F.dropout(x + 0.1 * torch.randn_like(x), 0.3, True) * torch.rand(len(x), 1)


class Linked(nn.Module):
    """Knows its weight by another name, and how often it was evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.evaluated = nn.Linear(16, 16), 0
        self.view, self.held = self.inner.weight.detach(), [self.inner.bias.data]

    def forward(self, x: Tensor) -> Tensor:
        self.evaluated += not self.training
        return self.inner(x) + (x @ self.view + self.held[0]) * (1 + 0.1 * self.evaluated)


class Again(nn.Module):
    """Draws, and is run once more in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.more = nn.BatchNorm1d(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: noisy(self.more(self.norm(F.gelu(x)))), x, use_reentrant=False)


class Twice(nn.Module):
    """One weight, used twice; the second use has no say at first."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.gate = nn.Linear(16, 16), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        return x + self.gate * self.shared(x.relu())


class Hooked(nn.Module):
    """A hook of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, output: output * 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Uncopied(nn.Module):
    def __deepcopy__(self, memo: Any) -> Any:
        raise NotImplementedError("one of a kind")

    def forward(self, x: Tensor) -> Tensor:
        return x


def in_a_lane() -> bool:
    return threading.current_thread().name.startswith("lane")


def unseen(x: Tensor) -> Tensor:
    """As an extension in C++ draws."""
    with torch._C.DisableTorchFunction():
        return x + torch.rand_like(x) if torch.is_grad_enabled() else x


OWN = {
    "noise": lambda: noisy, "checkpointed": Again, "attribute": lambda: Counting("attribute"), "list": lambda: Counting("list"),
    **{where: partial(Counting, where) for where in ("nested", "object", "iterator")}, "linked": Linked,
    "buffer": lambda: Counting("buffer"), "hooked": Hooked, "uncopied": Uncopied, "twice": Twice,
    "under": lambda: Under(), "unseen": lambda: unseen,
    "thread": lambda: lambda x: x * (1 + 1e-3 * in_a_lane()),
    "inputs": lambda: lambda x: x,
    "python": lambda: lambda x: x * (1 + random.random()), "numpy": lambda: lambda x: x * (1 + float(numpy.random.rand())),
}  # fmt: skip


def own(name: str, *words: str) -> tuple[str, ...]:
    register("model", "lanes_own", lambda num_classes, in_chans: Own_(OWN[name](), name == "inputs"))
    return (*(word for word in SMALL if not word.startswith("model")), "model=custom", "model.name=lanes_own", *words)


@pytest.mark.parametrize("name", ["noise", "checkpointed"])
def test_what_a_model_draws_and_runs_again_is_its_threads_own(tmp_path: Path, name: str) -> None:
    assert_same(tmp_path, own(name), (2,))


def test_a_view_of_a_weight_and_what_an_evaluation_leaves_are_the_models(tmp_path: Path) -> None:
    assert_same(tmp_path, own("linked", "eval_every=2"), (2,))


def test_what_is_kept_in_an_attribute_is_looked_at_however_deep() -> None:
    generator, ring, weight = torch.Generator(), [1], torch.zeros(1)
    ring.append(ring)  # type: ignore[arg-type]
    for value, change in ((SimpleNamespace(a={"b": [1]}), lambda v: v.a["b"].append(2)), (ring, lambda v: v.append(3)),
                          ({"it": itertools.count()}, lambda v: next(v["it"])), ([weight], lambda v: v[0].add_(1)),
                          (SimpleNamespace(lock=threading.Lock(), n=0), lambda v: setattr(v, "n", 1)),
                          ((generator,), lambda v: torch.rand(1, generator=v[0])),
                          ([numpy.random.default_rng(0)], lambda v: v[0].random()),
                          (numpy.zeros(2), lambda v: v.fill(1))):  # fmt: skip
        before = Reached(value).digest
        assert Reached(value).digest == before, value
        change(value)
        assert Reached(value).digest != before, value


REASONS = {
    "attribute": "keeps what a forward leaves in part.calls", "list": "keeps what a forward leaves in part.seen",
    "buffer": "changes the buffer part.count in its forward", "uncopied": "cannot be copied (NotImplementedError: one of a",
    "nested": "keeps what a forward leaves in part.held", "object": "keeps what a forward leaves in part.object",
    "iterator": "keeps what a forward leaves in part.numbers",
    "unseen": "draws random numbers in a way that is not seen", "python": "draws from Python's or NumPy's generator",
    "numpy": "draws from Python's or NumPy's generator", "thread": "gives other bits in a thread: ",
    "inputs": "changes its inputs",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Pickle, copy, and deepcopy support will be removed from itertools")
@pytest.mark.parametrize("name", REASONS)
def test_a_model_that_threads_cannot_share_runs_one_shard_at_a_time_and_says_why(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "isobatch"):
        assert at_once(tmp_path / "2", *own(name), "threads=2") == 0
    assert f"one shard at a time, not 2: the model {REASONS[name]}" in caplog.text
    if name in ("buffer", "inputs", "thread"):
        train(tmp_path / "1", *own(name), "threads=1")
        assert same(training(state_of(tmp_path / "2")), training(state_of(tmp_path / "1")))


def test_hooks_and_what_looks_at_single_shards_are_said_in_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, why in ((own("hooked"), "the model has forward hooks of its own"),
                       ((*RICH, "profile=time"), "profile=time looks at one at a time")):  # fmt: skip
        assert at_once(tmp_path / why[:9], *words, "threads=2") == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"reduction=exact needs every kernel to see a shard alone, and {why}" in said
        assert "threads=2: reduction=exact runs 1 shard at a time here, with 1 thread for each" in said


def test_a_hook_of_all_modules_is_no_threads_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        with caplog.at_level(logging.WARNING, "isobatch"):
            assert at_once(tmp_path, *RICH, "threads=2") == 0
    finally:
        hook.remove()
    assert "one shard at a time, not 2: the model has hooks that are called for every module" in caplog.text


def test_a_weight_that_autocast_makes_half_twice_runs_one_shard_at_a_time(tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING, "isobatch"):
        assert at_once(tmp_path / "2", *own("twice", "precision=bf16"), "threads=2") == 0
    assert "uses part.shared.weight twice in a forward, under autocast" in caplog.text
    train(tmp_path / "1", *own("twice", "precision=bf16"), "threads=1")
    assert same(training(state_of(tmp_path / "2")), training(state_of(tmp_path / "1")))
    assert at_once(tmp_path / "fp32", *own("twice"), "threads=2") == 3


def test_lanes_of_code_of_ones_own_have_to_be_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("isobatch.runtime.cores.usable", lambda: 2)
    monkeypatch.setattr(crews.ThreadCrew, "seconds", lambda *_: 0.1)
    with caplog.at_level(logging.INFO, "isobatch"):
        assert at_once(tmp_path / "null", *own("twice"), "threads=null") == 0
    assert "is code of your own, which may keep something from shard to shard" in caplog.text
    assert at_once(tmp_path / "2", *own("twice"), "threads=2") == 3


class Under(Twice):
    """With an autocast of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


def test_an_autocast_of_the_models_own_keeps_its_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = own("under", "optimizer.lr=0.1")
    monkeypatch.setattr("isobatch.planner.sharing.owns_code", lambda *_: False)
    for count in ("1", "null", "2"):  # null: too quick a shard for threads
        assert at_once(tmp_path / count, *words, f"threads={count}") == 0
        assert torch.is_autocast_cache_enabled()
        assert same(training(state_of(tmp_path / count)), training(state_of(tmp_path / "1"))), count


def test_weights_that_move_or_are_frozen_meanwhile_are_the_ones_that_are_trained(tmp_path: Path) -> None:
    def moved(state: Any, parts: Any, data: Any) -> None:
        first, *others = state.parameters
        first.data = first.data.clone()
        others[0].requires_grad_(state.step != 1)

    for count in (1, 2):
        train(tmp_path / str(count), *RICH, f"threads={count}", observe=moved)
    assert same(training(state_of(tmp_path / "2")), training(state_of(tmp_path / "1")))


def test_numbers_beside_a_loss_are_added_in_the_order_of_the_shards() -> None:
    class Inner:
        module, loss_factor = nn.Linear(1, 1), 1.0

    values = {0: 1e16, 1: 1.0, 2: -1e16}
    found = []
    for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0)):
        reducer = ByElements(Inner(), Given(torch.zeros(()), None, {"it": 0.0}), 1, Batch(3, 1, 1), Ranks(), CPU)  # type: ignore[arg-type]
        for shard in order:
            reducer.note(shard, 1 / 3, None, {"it": values[shard]})
        found.append(reducer.named())
    assert found[0] == found[1] == found[2]


def test_half_weights_are_not_kept_where_another_thread_empties_the_cache() -> None:
    level = load(plain("precision=bf16")).precision
    with Uncached(level).autocast(CPU):
        assert torch.is_autocast_enabled("cpu") and not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled() and not torch.is_autocast_enabled("cpu")


def test_a_loss_that_is_not_finite_is_of_the_shard_that_gave_it(tmp_path: Path) -> None:
    register("data", "lanes_one_bad", OneBad)
    words = (*(word for word in own("noise") if not word.startswith("data")), "data=custom", "data.name=lanes_one_bad",
             "data.num_workers=0", "data.num_classes=10", "sampler=sequential", "threads=2")  # fmt: skip
    with pytest.raises(JobFailed, match=r"train/loss is nan at step 1 on rank 0 \(samples 4, 10, 16, 22\)"):
        train(tmp_path, *words)


def test_the_plan_counts_what_lanes_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = []
    for count in (1, 2):
        train(tmp_path / str(count), *RICH, "task=plan", "model.width=512", "data.image_size=32", f"threads={count}")
        text = " ".join(capsys.readouterr().out.split())
        assert f"{count} shard{'s' * (count > 1)} at a time, of 6 that a micro batch has room for" in text
        assert ("2 shards at a time" in text) == (count == 2)
        held.append(json.loads((tmp_path / str(count) / "plan.json").read_text())["memory_mb"])
    one, two = held
    assert two["activations"] == pytest.approx(2 * one["activations"], abs=3e-3)
    assert two["exact_sums"] == pytest.approx(one["exact_sums"] + 2 * one["gradients"], abs=3e-3)
    assert two["peak"] > one["peak"]


def test_ranks_and_a_resume_have_lanes_or_not_as_they_like(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "1", *RICH, "threads=1")
    expected = training(state_of(tmp_path / "1"))
    train_ranks(2, tmp_path / "ranks", *RICH, "threads=2")
    assert same(training(state_of(tmp_path / "ranks")), expected)
    train_and_stop(tmp_path / "run", 2, *RICH, "threads=2")
    for count in (1, 3):
        with caplog.at_level(logging.INFO, "isobatch"):
            train(tmp_path / f"rest{count}", *RICH, f"threads={count}", f"resume={tmp_path / 'run'}")
        assert same(training(state_of(tmp_path / f"rest{count}")), expected)
    assert "goes on from" in caplog.text and "the promise drops" not in caplog.text


def test_a_run_that_began_with_several_threads_for_a_kernel_keeps_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_and_stop(tmp_path / "run", 1, *RICH, "threads=1")

    def earlier(state: dict[str, Any]) -> None:
        state["identity"]["threads"] = state["config"]["threads"] = 3

    rewrite(tmp_path / "run/checkpoints/last", earlier)
    seen = []
    with caplog.at_level(logging.INFO, "isobatch"):
        lanes = at_once(tmp_path / "rest", *RICH, "threads=2", f"resume={tmp_path / 'run'}",
                        observe=lambda *_: seen.append(torch.get_num_threads()))  # fmt: skip
    assert (lanes, set(seen), state_of(tmp_path / "rest")["identity"]["threads"]) == (0, {3}, 3)
    assert "this run began with 3 threads for each kernel, which decide its bits" in caplog.text
    assert "threads=2: reduction=exact runs 1 shard at a time here, with 3 threads for each" in caplog.text
    assert "the promise drops" not in caplog.text


class Drawn:
    """Samples with draws of their own from all generators."""

    def __init__(self, split: str):
        self.split = split

    def __len__(self) -> int:
        return 63 if self.split == "train" else 4

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.rand(3, 4, 4) + float(numpy.random.rand()) + random.random(), i % 10


def test_lanes_that_nobody_asked_for_are_for_shards_that_take_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobatch.runtime.cores.usable", lambda: 2)
    for took, lanes in ((0.001, 0), (0.1, 3)):
        monkeypatch.setattr(crews.ThreadCrew, "seconds", lambda *_, took=took: took)
        with caplog.at_level(logging.INFO, "isobatch"):
            assert at_once(tmp_path / str(took), *RICH, "threads=null") == lanes
    assert caplog.text.count("one shard at a time: it takes 1.0 ms, too little for threads (threads=2: 2 at a time all") == 1
    assert same(training(state_of(tmp_path / "0.1")), training(state_of(tmp_path / "0.001")))


def test_what_is_read_and_mixed_meanwhile_is_so_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process reads beside the lanes, which draw from the default generator too; every window is run twice."""
    register("data", "lanes_drawn", Drawn)
    register("model", "lanes_own", lambda num_classes, in_chans: Own_(noisy))
    words = (*(word for word in SMALL if not word.startswith(("model", "data"))), "model=custom", "model.name=lanes_own",
             "data=custom", "data.name=lanes_drawn", "data.num_workers=0", "augment=mixup", "data.num_classes=10",
             "optimizer=sgd", "optimizer.sam=0.05")  # fmt: skip
    used = []
    monkeypatch.setattr("isobatch.train.crews.undisturbed", lambda prepare: used.append(prepare) or undisturbed(prepare))
    for count in (1, 3):
        run.run_job(plain(*words, f"threads={count}"), tmp_path / str(count), Ranks())
    assert len(used) == 1
    assert same(training(state_of(tmp_path / "3")), training(state_of(tmp_path / "1")))


class OneBad(Drawn):
    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((3, 4, 4), float("nan") if i == 16 else 1.0) + torch.rand(3, 4, 4), i % 10


class Failing(nn.Module):
    """Fails, or draws past everything, in the second step."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if STEP[0] == 1 and in_a_lane():
            if self.how == "fails":
                raise ValueError("not this one")
            return unseen(x)
        return x


STEP = [0]
OWN |= {how: lambda how=how: Failing(how) for how in ("fails", "late draw")}


@pytest.mark.parametrize(("how", "kind", "said"), [
    ("fails", ValueError, "^not this one$"),
    ("late draw", JobFailed, r"^step 2: 2 shards run at once, and the model draws random numbers .* set threads=1"),
])  # fmt: skip
def test_what_goes_wrong_in_a_lane_ends_the_run_as_it_is(tmp_path: Path, how: str, kind: type[Exception], said: str) -> None:
    def observe(*_: Any) -> None:
        STEP[0] += 1

    STEP[0] = 0
    with pytest.raises(kind, match=said):
        train(tmp_path, *own(how), "threads=2", observe=observe)
    assert not [t for t in threading.enumerate() if t.name.startswith("lane")]
    assert torch.random.default_generator is torch.default_generator


TIMM = {
    "resnet": ("model.arch=test_resnet",),
    "resnet18": ("model.arch=resnet18", "data.image_size=64", "channels_last=true"),
    "checkpointed": ("model.arch=test_vit", "+model.kwargs.img_size=32", "model.grad_checkpointing=true"),
    "convnext": ("model.arch=test_convnext", "precision=bf16"),
    "efficientnet": ("model.arch=test_efficientnet",),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_networks_of_timm_are_the_same_with_any_number_of_lanes(tmp_path: Path, name: str) -> None:
    words = (*(word for word in SMALL if not word.startswith(("model", "data.image_size"))), "model=timm",
             "model.drop_rate=0.2", "model.drop_path_rate=0.2", "augment=mixup", "data.image_size=32", *TIMM[name])  # fmt: skip
    assert_same(tmp_path, words, (2, 4))
