"""The learning rate: lengths in any unit, the shapes, timm's own, and the one that follows evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import BASE, plain, rows, train, train_ranks
from torch.optim import lr_scheduler

from isobatch.amounts import amount, updates
from isobatch.config import load, options
from isobatch.errors import ConfigError
from isobatch.runtime.timm_import import timm
from isobatch.scheduler import Schedule

TOTAL, PER_EPOCH = 40, 8


def factors(total: int = TOTAL, each: int = PER_EPOCH, **node: Any) -> list[float]:
    schedule = Schedule(options("scheduler", node), total, each)
    return [schedule(update) for update in range(total)]


def test_a_length_is_updates_epochs_or_a_share() -> None:
    found = {value: updates(amount("k", value), 400, 10) for value in (7, "7", 2.9, 0.05, "5%", "2.5ep", "3 ep", 0, "1.5e1")}
    assert list(found.values()) == [7, 7, 2, 20, 20, 25, 30, 0, 15]
    for bad in ("5 days", "-3", "101%", "ep", True, -1, float("nan"), [3], "1e400"):
        with pytest.raises(ConfigError, match=r"scheduler.warmup="):
            options("scheduler", {"name": "cosine", "warmup": bad})


@pytest.mark.parametrize("name", ["constant", "cosine", "step", "poly", "tanh", "wsd"])
def test_units_mean_the_same(name: str) -> None:
    assert factors(name=name, warmup="1ep") == factors(name=name, warmup=8) == factors(name=name, warmup="20%")
    assert factors(name=name, warmup="1ep") == factors(name=name, warmup=0.2) != factors(name=name)


def test_the_warm_up_begins_where_it_is_told() -> None:
    assert factors(name="constant", warmup=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(name="constant", warmup=4, warmup_start=0.2)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors(name="constant", warmup=4, warmup_start=0.2, warmup_shape="constant")[:5] == [0.2] * 4 + [1.0]
    with pytest.raises(ConfigError, match="constant warm-up needs its factor"):
        options("scheduler", {"name": "cosine", "warmup_shape": "constant"})


def test_restarts_cooldown_and_the_stable_part() -> None:
    found = factors(name="cosine", cycle="1ep", cycle_decay=0.5, final=0.1)
    assert [found[i] for i in (0, 8, 16)] == pytest.approx([1.0, 0.5, 0.25]) and found[7] < 0.2
    longer = factors(name="poly", cycle=8, cycle_mul=2)
    assert [i for i, f in enumerate(longer) if f == 1.0] == [0, 8, 24]
    cooled = factors(name="cosine", cooldown="1ep", final=0.25)
    assert cooled[-8:] == [0.25] * 8 and cooled[31] > 0.25
    stable = factors(name="wsd", warmup=4, decay="25%")
    assert stable[3:31] == [1.0] * 28 and stable[31] == pytest.approx(0.9) and stable[-1] == pytest.approx(0.1)
    for shape in ("cosine", "sqrt"):
        ends = factors(name="wsd", decay=10, decay_shape=shape, final=0.5)
        assert ends[29] == 1.0 and ends[30] == 1.0 and 0.5 < ends[-1] < 0.7
    held = factors(name="cosine", per_epoch=True)
    assert all(len(set(held[i : i + 8])) == 1 for i in range(0, 40, 8)) and len(set(held)) == 5


def test_step_by_period_and_by_milestones() -> None:
    exponential = lr_scheduler.ExponentialLR(optimizer := torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0), 0.97)
    expected = []
    for _ in range(5):
        expected += [optimizer.param_groups[0]["lr"]] * 8
        optimizer.step()
        exponential.step()
    assert factors(name="step", every="1ep", gamma=0.97) == pytest.approx(expected)
    assert factors(name="step", at=["1ep", "50%", 0.75], gamma=0.5)[::8] == [1.0, 0.5, 0.5, 0.25, 0.125]
    assert min(factors(name="step", every=4, gamma=0.5, final=0.2)) == 0.2


def dummy() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.parametrize(("node", "made"), [
    ({"name": "timm", "sched": "cosine", "warmup": "2ep", "warmup_start": 0.01, "final": 0.1, "kwargs": {"k_decay": 2.0}},
     {"sched": "cosine", "num_epochs": 5, "warmup_epochs": 2, "warmup_lr": 0.01, "min_lr": 0.1, "k_decay": 2.0}),
    ({"name": "timm", "sched": "step", "every": "2ep", "kwargs": {"decay_rate": 0.5, "noise": 0.4, "noise_seed": 3}},
     {"sched": "step", "num_epochs": 5, "decay_epochs": 2, "decay_rate": 0.5, "noise": 0.4, "noise_seed": 3}),
    ({"name": "timm", "sched": "wsd", "every": "1ep"}, {"sched": "wsd", "num_epochs": 5, "decay_epochs": 1}),
    ({"name": "tanh"}, {"sched": "tanh", "num_epochs": 5}),
    ({"name": "poly", "power": 0.9, "final": 0.05}, {"sched": "poly", "num_epochs": 5, "decay_rate": 0.9, "min_lr": 0.05}),
    ({"name": "cosine", "cycle": "1ep", "cycle_decay": 0.5}, {"sched": "cosine", "num_epochs": 1, "cycle_decay": 0.5,
                                                             "cycle_limit": 5}),
])  # fmt: skip
def test_it_is_what_timm_does_update_by_update(node: dict[str, Any], made: dict[str, Any]) -> None:
    optimizer = dummy()
    scheduler, _ = timm.scheduler.create_scheduler_v2(optimizer, step_on_epochs=False, updates_per_epoch=PER_EPOCH, **made)
    expected = []
    for update in range(TOTAL):
        scheduler.step_update(update)
        expected.append(optimizer.param_groups[0]["lr"])
    found = factors(**node)
    assert found == pytest.approx(expected, abs=1e-12) and len(set(found)) > 1
    # the learning rate of an update does not depend on which was asked for before
    schedule = Schedule(options("scheduler", node), TOTAL, PER_EPOCH)
    assert [schedule(update) for update in reversed(range(TOTAL))] == found[::-1]


def test_what_timm_does_not_take_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"scheduler.sched=cosine: timm could not build it \(.*no_such"):
        factors(name="timm", kwargs={"no_such": 1})
    with pytest.raises(ConfigError, match=r"scheduler.kwargs.warmup_epochs=5: .* set scheduler.warmup"):
        options("scheduler", {"name": "timm", "kwargs": {"warmup_epochs": 5}})


@pytest.mark.parametrize(("words", "line"), [
    (("every=5",), r"scheduler\.every=5: says nothing to scheduler\.sched=cosine; .* scheduler\.sched=step or wsd or rsqrt"),
    (("sched=step", "at=[1]"), r"scheduler\.at=\[1\]: says nothing to scheduler\.sched=step; .* scheduler\.sched=multistep"),
    (("sched=step", "every=2", "final=0.1"), r"scheduler\.final=0\.1: says nothing to scheduler\.sched=step"),
    (("sched=constant", "kwargs.cycle_limit=2"), r"scheduler\.kwargs\.cycle_limit=2: says nothing"),
    (("kwargs.plateau_mode=min",), r"scheduler\.kwargs\.plateau_mode=min: says nothing to .*=cosine; leave it out$"),
])  # fmt: skip
def test_what_timms_schedule_would_leave_out_is_refused(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load(plain("scheduler=timm", *(f"++scheduler.{word}" for word in words)))


def test_plateau_is_torchs_and_remembers(tmp_path: Path) -> None:
    node = {"name": "plateau", "patience": 1, "gamma": 0.5, "cooldown": 1, "threshold": 0.1, "final": 0.2}
    losses = [3.0, 2.0, 1.95, 1.9, 1.9, 1.9, float("nan"), 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    reference = lr_scheduler.ReduceLROnPlateau(dummy(), factor=0.5, patience=1, cooldown=1, threshold=0.1, min_lr=0.2)
    schedule = Schedule(options("scheduler", node), TOTAL, PER_EPOCH)
    for number, loss in enumerate(losses):
        again = Schedule(options("scheduler", node), TOTAL, PER_EPOCH)  # as a run that is resumed here
        again.load_state_dict(schedule.state_dict())
        reference.step(loss)
        schedule.saw({"eval/loss": loss})
        again.saw({"eval/loss": loss})
        assert schedule(number) == again(number) == reference.get_last_lr()[0]
        assert schedule.state_dict() == again.state_dict()
    assert schedule(0) == 0.2
    with pytest.raises(ConfigError, match=r"scheduler.mode=auto: whether more or less of/mine is better"):
        options("scheduler", {"name": "plateau", "metric": "of/mine"})


FOLLOWING = (*BASE[:4], "threads=1", "scheduler=plateau", "scheduler.patience=0", "scheduler.gamma=0.5",
             "scheduler.threshold=0.5", "scheduler.warmup=2", "epochs=null", "batch.effective=48", "batch.micro=24",
             "batch.shard=null",
             "reduction=exact", "log_every=1", "eval_every=2", "optimizer=sgd", "optimizer.lr=0.1")  # fmt: skip


def test_a_run_that_follows_its_evaluations_goes_on_as_if_never_stopped_on_any_plan(tmp_path: Path) -> None:
    train(tmp_path / "whole", *FOLLOWING, "steps=8")
    rates = rows(tmp_path / "whole", "train/lr")
    assert rates[0] == 0.05 and rates[-1] < rates[1] == 0.1
    train(tmp_path / "first", *FOLLOWING, "steps=4")
    train_ranks(2, tmp_path / "second", *FOLLOWING, "steps=8", f"resume={tmp_path / 'first'}")
    assert rows(tmp_path / "first", "train/lr") + rows(tmp_path / "second", "train/lr") == rates
    assert rows(tmp_path / "second", "train/loss") == rows(tmp_path / "whole", "train/loss")[4:]


def test_a_metric_that_no_evaluation_has_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scheduler.metric=eval/raw_loss: an evaluation here has no such metric"):
        train(tmp_path, *FOLLOWING, "steps=8", "scheduler.metric=eval/raw_loss")
    assert not (tmp_path / "metrics.jsonl").exists() or not rows(tmp_path, "train/loss")
