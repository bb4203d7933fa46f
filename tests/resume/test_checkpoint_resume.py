"""Resume: the rest of a run is the rest of that run on any plan; what is no plan is refused by name."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import cut, digest, rewrite, same, state_of, train_and_stop, training
from harness import BASE, on_ranks, rows, summary, train

from isobatch.errors import ConfigError, JobFailed, Stopped
from isobatch.evaluate.evaluator import Evaluator
from isobatch.launch.signals import STOP
from isobatch.logger import Logger
from isobatch.train import loop

# everything that has a state: momentum, batch norm, dropout, EMA, a schedule with warmup, a growing loss scale
RICH = (
    *BASE, "epochs=null", "steps=9", "eval_every=4", "log_every=1", "data=synthetic", "data.samples=42", "data.eval_samples=8",
    "data.image_size=4", "batch.effective=12", "batch.micro=4",
    "batch.shard=null", "model.norm=true", "model.drop_rate=0.2", "ema=ema",
    "ema.decay=0.9", "scheduler=cosine", "scheduler.warmup=3", "optimizer=adamw", "max_grad_norm=1.0",
)  # fmt: skip
SCALED = ("precision=amp", "precision.dtype=float16", "precision.loss_scale=256", "precision.growth_interval=3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An undisturbed run with a checkpoint at every step. An epoch has 4 windows: steps 4 and 8 lie between epochs."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, *RICH, *SCALED, "checkpoint.every=1", "checkpoint.keep=99")
    return folder


LATER = [pytest.param(stop, marks=pytest.mark.slow) for stop in (2, 8)]


@pytest.mark.parametrize("stop", [1, 4, 5, *LATER])  # in the warmup, between epochs, in mid-epoch and mid-growth
def test_a_stop_at_any_step_changes_nothing(tmp_path: Path, whole: Path, stop) -> None:
    train(tmp_path / "rest", *RICH, *SCALED, f"resume={whole}", f"checkpoint.load=step-{stop}")
    assert same(training(state_of(tmp_path / "rest")), training(state_of(whole)))
    skip = [row["step"] <= stop for row in map(json.loads, (whole / "metrics.jsonl").read_text().splitlines())]
    for key in ("step", "train/loss", "train/lr", "train/grad_norm", "train/loss_scale", "eval/loss"):
        lines = map(json.loads, (whole / "metrics.jsonl").read_text().splitlines())
        later = [row[key] for row, early in zip(lines, skip, strict=True) if key in row and not early]
        assert rows(tmp_path / "rest", key) == later, key
    assert summary(tmp_path / "rest")["weights_sha256"] == summary(whole)["weights_sha256"]


def test_an_evaluation_that_a_stop_left_out_is_made_up_for(tmp_path: Path, whole: Path) -> None:
    for stop in (4, 9):  # at an evaluation, and at the very end
        run = tmp_path / str(stop)
        train_and_stop(run, stop, *RICH, *SCALED)
        assert summary(run)["state"] == "stopped" and stop not in [
            row["step"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "eval/loss" in row
        ]
        train(run, *RICH, *SCALED, "checkpoint.resume=auto")
        assert rows(run, "eval/loss") == rows(whole, "eval/loss")
        assert rows(run, "step") == rows(whole, "step")
        assert same(training(state_of(run)), training(state_of(whole)))
        assert summary(run)["state"] == "completed"


def test_exact_goes_on_with_the_same_bits_on_another_number_of_ranks(tmp_path: Path) -> None:
    setting = (*RICH, "reduction=exact", "checkpoint.every=3", "checkpoint.keep=9")
    train(tmp_path / "one", *setting)

    def job(ranks):
        words = ("parallel=ddp", f"resume={tmp_path / 'one'}", "checkpoint.load=step-3")
        train(tmp_path / "two", *setting, *words, ranks=ranks)

    on_ranks(2, tmp_path / "store", job)
    train(tmp_path / "back", *setting, f"resume={tmp_path / 'two'}", "checkpoint.load=step-6")
    expected = training(state_of(tmp_path / "one"))
    assert same(training(state_of(tmp_path / "two")), expected)
    assert same(training(state_of(tmp_path / "back")), expected)
    assert summary(tmp_path / "two")["plan"]["accumulation_steps"] == 2


def test_shards_stay_as_they_were_cut_when_the_number_of_replicas_changes(tmp_path: Path, caplog) -> None:
    setting = tuple(word for word in RICH if not word.startswith("batch.micro"))
    train_and_stop(tmp_path / "run", 3, *setting, "accumulation=3")

    def resumed(name: str, *words: str) -> dict:
        train(tmp_path / name, *setting, *words, f"resume={tmp_path / 'run'}")
        return summary(tmp_path / name)["plan"]

    with caplog.at_level(logging.INFO, "isobatch"):
        plan = resumed("dp", "accumulation=3", "parallel=dp", "parallel.replicas=3")
    assert (plan["micro_batch"], plan["num_shards"], plan["accumulation_steps"]) == (4, 3, 1)
    assert "reduction=fast on another number of replicas" in caplog.text
    with pytest.raises(ConfigError, match=r"batch\.micro=6: .* was trained with batch.micro=4"):
        resumed("typed", "accumulation=2")  # the model has batch norm
    free = ("model.norm=false", "model.drop_rate=0")
    train_and_stop(tmp_path / "plain", 3, *setting, *free, "accumulation=3")
    train(tmp_path / "other", *setting, *free, "accumulation=2", f"resume={tmp_path / 'plain'}")
    assert summary(tmp_path / "other")["plan"]["micro_batch"] == 6
    assert "batch.micro 4 -> 6: the shards are cut anew" in caplog.text


def test_an_open_effective_batch_stays_what_it_was(tmp_path: Path) -> None:
    rich = (word for word in RICH if not word.startswith("batch."))
    setting = (*rich, "batch.effective=null", "batch.micro=4", "batch.shard=null", "accumulation=3")
    train_and_stop(tmp_path / "run", 2, *setting)
    train(tmp_path / "more", *setting, "parallel=dp", "parallel.replicas=3", f"resume={tmp_path / 'run'}")
    assert summary(tmp_path / "more")["plan"]["effective_batch"] == 12


CHANGES = [
    ("seed=1", "seed=1: .* was trained with seed=0"),
    ("optimizer.lr=0.5", r"optimizer\.lr=0\.5: .* was trained with optimizer\.lr="),
    ("model.width=8", r"model\.width=8: .* was trained with model\.width=16"),
    ("data.samples=44", r"data\.samples=44"),
    ("batch.effective=6", r"batch\.effective=6: .* was trained with batch\.effective=12"),
    ("batch.micro=6", r"batch\.micro=6: .* was trained with batch\.micro=4"),
    ("sampler=sequential", r"sampler\.name=sequential"),
    ("scheduler=constant", r"scheduler\.name=constant"),
    ("max_grad_norm=null", r"max_grad_norm=null: .* was trained with max_grad_norm=1\.0"),
    ("steps=3", "steps=3: .* is at step 9 already, past 3"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_changed_contract_is_refused_by_name(tmp_path: Path, whole: Path, change, message) -> None:
    before = digest(whole / "checkpoints/last")
    with pytest.raises(ConfigError, match=message):
        train(tmp_path / "rest", *RICH, *SCALED, f"resume={whole}", change)
    assert digest(whole / "checkpoints/last") == before


def test_what_is_only_plan_is_not_refused(tmp_path: Path, whole: Path, caplog) -> None:
    words = ("log_every=2", "eval_every=3", "threads=2", "checkpoint.keep=1", "data.num_workers=0", "on_nonfinite=skip")
    with caplog.at_level(logging.INFO, "isobatch"):
        train(tmp_path / "rest", *RICH, *SCALED, f"resume={whole}", "checkpoint.load=step-6", *words)
    assert summary(tmp_path / "rest")["steps"] == 9
    assert 'the promise drops from "to the bit" to "same effective batch": threads 1 -> 2' in caplog.text


def test_an_allowed_change_is_stated(tmp_path: Path, whole: Path, caplog) -> None:
    words = ("optimizer.lr=0.5", "optimizer.weight_decay=0.25", "allow_contract_change=true")
    with caplog.at_level(logging.INFO, "isobatch"):
        rest = train(tmp_path / "rest", *RICH, *SCALED, f"resume={whole}", "checkpoint.load=step-6", *words)
    assert "contract changed: optimizer.lr" in caplog.text and "-> 0.5, optimizer.weight_decay" in caplog.text
    assert max(rest.lrs) > 0.1, "the typed learning rate counts, not the saved one"
    groups = state_of(tmp_path / "rest")["optimizer"]["param_groups"]
    assert 0.25 in [group["weight_decay"] for group in groups]


def test_a_finished_run_does_nothing_and_says_so(tmp_path: Path, whole: Path, caplog) -> None:
    run = tmp_path / "run"
    train(run, *RICH)
    files = {p: p.read_bytes() for p in (run / "summary.json", run / "metrics.jsonl", run / "checkpoints/last/state.pt")}
    result = summary(run)["final"]["eval/accuracy"]
    with caplog.at_level(logging.INFO, "isobatch"):
        again = train(run, *RICH, "checkpoint.resume=auto")
    assert again.weights == [] and again.result == result
    assert {p: p.read_bytes() for p in files} == files
    assert "is complete at step 9: nothing to do" in caplog.text
    other = train(tmp_path / "other", *RICH, f"resume={run}")
    assert other.weights == [] and summary(tmp_path / "other")["weights_sha256"] == summary(run)["weights_sha256"]


def test_a_raised_end_goes_on_and_says_how_the_schedule_was_extended(tmp_path: Path, whole: Path, caplog) -> None:
    with caplog.at_level(logging.INFO, "isobatch"):
        rest = train(tmp_path / "rest", *RICH, *SCALED, "steps=12", f"resume={whole}")
    assert len(rest.weights) == 3 and summary(tmp_path / "rest")["steps"] == 12
    assert "12 steps instead of 9: the cosine schedule is laid over all, so the learning rate goes on at" in caplog.text


def test_a_refusal_leaves_a_complete_run_as_it_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, *RICH)
    files = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    with pytest.raises(ConfigError, match=r"checkpoint\.resume=never to start over"):
        train(run, *RICH, "seed=1", "checkpoint.resume=auto")
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == files
    train(run, *RICH, "seed=1", "checkpoint.resume=never")
    assert state_of(run)["config"]["seed"] == 1
    assert torch.load(run / "checkpoints-old-1/last/state.pt")["config"]["seed"] == 0
    assert rows(run, "step").count(1) == 1, "the earlier run's rows are gone"


def test_evaluate_takes_the_checkpoint_that_is_asked_for(tmp_path: Path, whole: Path) -> None:
    losses = [row for row in map(json.loads, (whole / "metrics.jsonl").read_text().splitlines()) if "eval/loss" in row]
    for row in losses:
        folder = tmp_path / str(row["step"])
        train(folder, *RICH, *SCALED, "task=evaluate", f"resume={whole}", f"checkpoint.load=step-{row['step']}")
        assert rows(folder, "eval/loss") == [row["eval/loss"]]
        assert not (folder / "checkpoints").exists()
    best = state_of(whole, "best")["counters"]["step"]
    train(tmp_path / "best", *RICH, *SCALED, "task=evaluate", f"resume={whole}", "checkpoint.load=best")
    assert rows(tmp_path / "best", "eval/loss") == [row["eval/loss"] for row in losses if row["step"] == best]


def test_the_best_model_moves_with_the_run(tmp_path: Path, monkeypatch) -> None:
    script = iter([value for value in (0.9, 0.5, 0.4, 0.3) for _ in range(2)])  # the average and the trained weights
    monkeypatch.setattr(Evaluator, "__call__", lambda self, model, step: {
        "eval/loss": 1.0, "eval/accuracy": next(script), "eval/samples": 8})  # fmt: skip
    train_and_stop(tmp_path / "run", 5, *RICH)
    train(tmp_path / "rest", *RICH, f"resume={tmp_path / 'run'}")
    assert digest(tmp_path / "rest/checkpoints/best") == digest(tmp_path / "run/checkpoints/best")
    assert state_of(tmp_path / "rest", "best")["counters"]["step"] == 4


def poison(monkeypatch, at_step: int) -> None:
    """A gradient and a loss of NaN in step `at_step` (1-based), whatever the model says."""
    original = loop.train_step

    def poisoned(state, parts, data, want_norm=False):
        if state.step + 1 == at_step:
            data.micro_batches = list(data.micro_batches)
            data.micro_batches[0].inputs = data.micro_batches[0].inputs * float("nan")
        return original(state, parts, data, want_norm)

    monkeypatch.setattr(loop, "train_step", poisoned)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_loss_of_nan_is_traced_and_never_saved(tmp_path: Path, monkeypatch, caplog, reduction) -> None:
    poison(monkeypatch, 3)
    setting = (*(w for w in RICH if w != "log_every=1"), "log_every=8", "checkpoint.every=1", f"reduction={reduction}")
    message = r"train/loss is nan at step 3 on rank 0 \(samples [0-9, .]+\); the last good"
    with pytest.raises(JobFailed, match=message) as failed:
        train(tmp_path, *setting)
    assert str(failed.value).count(",") >= (3 if reduction == "exact" else 7), "the samples of the shard"
    assert state_of(tmp_path)["counters"]["step"] == 2 and "checkpoint of step 3 is not saved" in caplog.text
    assert summary(tmp_path)["state"] == "failed" and "step 3" in summary(tmp_path)["error"]
    assert not (tmp_path / "checkpoints/best").exists() and summary(tmp_path)["best"] == {}


def test_skipped_steps_are_counted_alike_on_all_ranks(tmp_path: Path, monkeypatch) -> None:
    def job(ranks):
        original = loop.train_step

        def poisoned(state, parts, data, want_norm=False):
            data.micro_batches = list(data.micro_batches)
            if state.step + 1 == 3 and ranks.rank == 1:
                data.micro_batches[0].inputs = data.micro_batches[0].inputs * float("nan")
            return original(state, parts, data, want_norm)

        counts = []
        loop.train_step = poisoned
        record = train(tmp_path / "run", *RICH, "parallel=ddp", "on_nonfinite=skip", ranks=ranks,
                       observe=lambda state, parts, window: counts.append(state.skipped_steps))  # fmt: skip
        return record.weights, counts

    (weights, counts), other = on_ranks(2, tmp_path / "store", job)
    assert other == (weights, counts) and counts[-1] == 1
    assert weights[2] == weights[1] != weights[3]
    assert (summary(tmp_path / "run")["skipped_steps"], summary(tmp_path / "run")["updates"]) == (1, 8)
    assert torch.isfinite(torch.tensor(weights)).all()


def test_a_final_state_that_cannot_be_saved_fails_the_run(tmp_path: Path, monkeypatch, caplog) -> None:
    import errno
    import os

    from isobatch.checkpoint.folder import CheckpointFolder

    def full(self, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CheckpointFolder, "publish", full)
    with pytest.raises(JobFailed, match="checkpoint of step 9 is not saved: No space left on device"):
        train(tmp_path, *RICH)
    found = summary(tmp_path)
    assert (found["state"], found["steps"]) == ("failed", 9), "training went on to its end"


def test_the_run_before_the_damage_is_taken_and_a_name_asked_for_is_not(tmp_path: Path, whole: Path, caplog) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for name in ("last", "step-9"):
        cut(run / "checkpoints" / name / "model.safetensors")
    train(tmp_path / "rest", *RICH, *SCALED, f"resume={run}")
    assert same(training(state_of(tmp_path / "rest")), training(state_of(whole)))
    assert caplog.text.count("is damaged (model.safetensors has") == 2


def test_a_state_that_does_not_fit_is_one_line(tmp_path: Path, whole: Path) -> None:
    import shutil

    def drop_group(state):
        state["optimizer"]["param_groups"].pop()

    def grow(state):
        key = next(iter(state["model"]))
        state["model"][key] = torch.zeros(1).expand(10**9)

    def text(state):
        state["optimizer"]["state"][0]["exp_avg"] = "import os"

    for number, change in enumerate((drop_group, grow, text)):
        run = tmp_path / f"run{number}"
        shutil.copytree(whole / "checkpoints/step-6", run / "checkpoints/last")
        rewrite(run / "checkpoints/last", change)
        with pytest.raises(ConfigError, match=r"^resume="):
            train(tmp_path / f"rest{number}", *RICH, *SCALED, f"resume={run}")


def test_a_logger_hears_which_rows_its_run_has_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after step 6, with a checkpoint of step 4: W&B's history can be added to alone, and holds steps 5 and 6."""
    heard: list[Any] = []
    monkeypatch.setattr(Logger, "start", lambda self, plan, run_id=None, samples=0, logged=(): heard.append(logged))
    words = (*BASE, "epochs=null", "batch.effective=4", "batch.micro=4", "checkpoint.every=4", "log_every=1", "eval_every=3")
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "run", *words, "steps=8", observe=lambda state, parts, data: 1 / (6 - state.step))
    train(tmp_path / "run", *words, "steps=8", f"resume={tmp_path / 'run'}")
    assert heard == [frozenset(), {(20, "train"), (24, "train"), (24, "eval")}]
    assert rows(tmp_path / "run", "train/loss") and rows(tmp_path / "run", "step") == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 8]


def positions_of(folder: Path, *words: str, stop: int | None = None) -> list[tuple[int, int, int]]:
    """(epoch, first position, last position) of the windows that a training reads."""
    seen: list[tuple[int, int, int]] = []

    def observe(state, parts, data) -> None:
        seen.append((data.window.epoch, data.window.positions.start, data.window.positions.stop))
        STOP.requested = 15 * (state.step + 1 == stop)

    try:
        train(folder, *words, observe=observe)
    except Stopped:
        assert stop is not None
    finally:
        STOP.requested = 0
    return seen


def test_another_batch_goes_on_at_the_next_sample(tmp_path: Path, caplog) -> None:
    """An epoch of 42 samples, stopped after 16 of them, goes on in windows of 12; also after a second stop."""
    caplog.set_level("INFO", "isobatch")
    rich = tuple(word for word in RICH if word.split("=")[0] not in ("epochs", "steps", "eval_every", "batch.effective"))
    words = (*rich, "steps=null", "epochs=2", "eval_every=null", "batch.micro=4", "scheduler.warmup=0", "model.norm=false")
    run = tmp_path / "run"
    positions_of(run, *words, "batch.effective=8", stop=2)
    more = (*words, "batch.effective=12", "allow_contract_change=true", f"resume={run}")
    rest = [(0, 16, 28), (0, 28, 40), (0, 40, 42), (1, 0, 12), (1, 12, 24), (1, 24, 36), (1, 36, 42)]
    assert positions_of(tmp_path / "whole", *more) == rest
    assert "from step 2 on there are other windows: the data go on at sample 16 of epoch 1" in caplog.text
    assert rows(tmp_path / "whole", "eval/loss")[-1] and summary(tmp_path / "whole")["samples"] == 84
    evaluated = [row["step"] for row in map(json.loads, (tmp_path / "whole/metrics.jsonl").read_text().splitlines())
                 if "eval/loss" in row]  # fmt: skip
    assert evaluated == [5, 9]  # the ends of the two epochs
    lrs = rows(tmp_path / "whole", "train/lr")
    assert lrs[0] == pytest.approx(2e-3 * 0.5 * (1 + math.cos(math.pi * 1 / 8))) and lrs[3] == pytest.approx(1e-3)
    again = (*words, "batch.effective=12", "allow_contract_change=true")
    assert positions_of(run, *again, f"resume={run}", stop=4) == rest[:2]
    caplog.clear()
    assert positions_of(run, *again, f"resume={run}") == rest[2:]
    assert "other windows" not in caplog.text
    assert same(training(state_of(run)), training(state_of(tmp_path / "whole")))
