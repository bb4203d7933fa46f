"""Reported faults of checkpoints and resume (cases 12, 15, 18, 23 to 26)."""

from __future__ import annotations

import functools
import logging
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint_tools import cut, digest, rewrite, same, state_of, train_and_stop, training
from harness import BASE, mean_probe, on_ranks, rows, summary, train
from precision_probes import QUIET, data_of, model_of

from isobatch.errors import ConfigError
from isobatch.evaluate.evaluator import Evaluator
from isobatch.runtime.distributed import Ranks

IDS = [float(i) for i in range(12)]
DIGITS = (*BASE, "epochs=null", "log_every=1")


@pytest.mark.parametrize(("accumulation", "steps", "stop"), [(1, 18, 8), (4, 6, 3)])
@pytest.mark.case(12)
def test_case_12_resume_in_mid_epoch_reads_every_sample_once(tmp_path: Path, accumulation, steps, stop) -> None:
    setting = (*mean_probe(IDS), "sampler=shuffle", "epochs=3", "batch.effective=null", "batch.micro=2", "batch.shard=null",
               f"accumulation={accumulation}")  # fmt: skip
    whole = train(tmp_path / "whole", *setting)
    assert len(whole.ids) == steps
    before = train_and_stop(tmp_path / "part", stop, *setting)
    after = train(tmp_path / "rest", *setting, f"resume={tmp_path / 'part'}")
    assert len(before) == stop, "a stop lies between windows"
    assert [*before, *after.ids] == whole.ids
    per_epoch = steps // 3
    epoch_1 = [i for ids in [*before, *after.ids][per_epoch : 2 * per_epoch] for i in ids]
    assert sorted(epoch_1) == list(range(12))
    assert summary(tmp_path / "rest")["steps"] == steps


@pytest.mark.case(15)
def test_case_15_the_loss_scale_goes_on(tmp_path: Path) -> None:
    setting = (*mean_probe([i / 12 for i in IDS]), "epochs=null", "steps=6", "batch.effective=4", "optimizer.lr=0.01",
               "precision=amp", "precision.dtype=float16", "precision.loss_scale=1024",
               "precision.growth_interval=2")  # fmt: skip
    train_and_stop(tmp_path / "part", 5, *setting)
    assert state_of(tmp_path / "part")["scaler"] == {"scale": 4096.0, "_growth_tracker": 1}
    seen = []
    train(tmp_path / "rest", *setting, f"resume={tmp_path / 'part'}",
          observe=lambda state, parts, window: seen.append(state.scaler.get_scale()))  # fmt: skip
    assert seen == [8192.0]


@pytest.mark.case(15)
def test_case_15_a_checkpoint_without_a_scaler_loads_under_amp_with_a_note(tmp_path: Path, caplog) -> None:
    setting = (*mean_probe(IDS), "epochs=null", "steps=2", "batch.effective=4", "optimizer.lr=0.01")
    train_and_stop(tmp_path / "part", 1, *setting)
    with caplog.at_level(logging.INFO, "isobatch"):
        train(tmp_path / "rest", *setting, f"resume={tmp_path / 'part'}", "precision=amp",
              "precision.dtype=float16", "precision.loss_scale=1024")  # fmt: skip
    assert "the checkpoint has no loss scale: it starts at 1024" in caplog.text
    assert 'the promise drops from "to the bit" to "same effective batch"' in caplog.text
    assert summary(tmp_path / "rest")["steps"] == 2


@pytest.mark.slow
@pytest.mark.case(18)
def test_case_18_no_wrapper_leaves_its_prefix_and_every_mode_loads_every_other(tmp_path: Path, monkeypatch) -> None:
    # what is saved is the same for all modes, so each mode loading one file is each mode loading all of them
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    setting = (*DIGITS, "steps=2", "eval_every=2", "batch.micro=24", "ema=ema", "reduction=exact", "model.norm=true")
    modes = {"single": (), "dp": ("parallel=dp",), "compile": ("compile=true",)}
    together = {"ddp": (), "ddp-compile": ("compile=true",)}  # fsdp adds in another order: parallel/test_sharding.py
    for name, words in modes.items():
        train(tmp_path / name, *setting, *words)

    def on_two(ranks):
        for name, words in together.items():
            train(tmp_path / name, *setting, "parallel=ddp", *words, ranks=ranks)
            words = (*words, "parallel=ddp", "task=evaluate", f"resume={tmp_path / 'compile'}")
            train(tmp_path / f"eval-{name}", *setting, *words, ranks=ranks)

    on_ranks(2, tmp_path / "two", on_two)
    first = training(state_of(tmp_path / "single"))
    assert not [key for key in (*first["model"], *first["ema"]) if key.startswith(("module.", "_orig_mod.", "model."))]
    for name in (*modes, *together):
        assert same(training(state_of(tmp_path / name)), first), name
    expected = rows(tmp_path / "single", "eval/loss")
    for name, words in modes.items():
        train(tmp_path / f"eval-{name}", *setting, *words, "task=evaluate", f"resume={tmp_path / 'ddp-compile'}")
    for name in (*modes, *together):
        assert rows(tmp_path / f"eval-{name}", "eval/loss") == expected, name


@pytest.mark.case(18)
def test_case_18_prefixes_of_a_foreign_file_are_stripped_and_a_file_that_matches_nothing_is_an_error(tmp_path) -> None:
    setting = (*DIGITS, "steps=2", "eval_every=2", "ema=ema")
    train(tmp_path / "a", *setting)
    last = tmp_path / "a/checkpoints/last"

    def rename(change):
        def on(state):
            for part in ("model", "ema"):
                state[part] = {change(k): v for k, v in state[part].items()}

        rewrite(last, on)

    rename(lambda key: f"_orig_mod.module.{key}")
    train(tmp_path / "b", *setting, "task=evaluate", f"resume={tmp_path / 'a'}")
    assert rows(tmp_path / "b", "eval/loss") == rows(tmp_path / "a", "eval/loss")
    train(tmp_path / "taught", *setting, "loss=distill", f"loss.teacher.checkpoint={tmp_path / 'a'}")
    rename(lambda key: f"other.{key}")
    with pytest.raises(ConfigError, match="none of its 4 model weights has a name of this model"):
        train(tmp_path / "c", *setting, "task=evaluate", f"resume={tmp_path / 'a'}")


@pytest.mark.case(18)
def test_case_18_a_part_that_is_called_as_a_prefix_keeps_its_name(tmp_path: Path) -> None:
    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 1)

        def forward(self, inputs):
            return self.module(inputs)

    setting = (*QUIET, *model_of("inner", lambda info: Inner()), *data_of("pairs", torch.ones(4, 2), torch.ones(4, 1)),
               "loss=mse", "batch.effective=2", "ema=ema", "steps=2")  # fmt: skip
    train(tmp_path / "whole", *setting)
    train_and_stop(tmp_path / "run", 1, *setting)
    for name in ("stripped of nothing", "stripped of DDP's"):
        train(tmp_path / name, *setting, f"resume={tmp_path / 'run'}")
        assert same(training(state_of(tmp_path / name))["model"], state_of(tmp_path / "whole")["model"])
        rewrite(tmp_path / "run/checkpoints/last",
                lambda state: {**state, "model": {f"module.{k}": v for k, v in state["model"].items()}})  # fmt: skip


@pytest.mark.case(18)
def test_case_18_the_exported_weights_load_into_timm(tmp_path: Path) -> None:
    import timm
    from safetensors.torch import load_file

    setting = ("logger=none", "threads=1", "data=synthetic", "data.samples=4", "data.eval_samples=2", "batch.effective=2",
               "data.image_size=16", "model=timm", "model.arch=test_resnet", "epochs=null", "steps=1", "ema=ema")  # fmt: skip
    train(tmp_path / "a", *setting)
    file = tmp_path / "a/checkpoints/last/model.safetensors"
    model = timm.create_model("test_resnet", num_classes=10, checkpoint_path=str(file))
    ema = state_of(tmp_path / "a")["ema"]
    assert same(dict(model.state_dict()), ema) and same(load_file(file), ema)
    prefix = "module._orig_mod.module."  # of DDP around torch.compile around DDP
    torch.save({"state_dict": {f"{prefix}{k}": v for k, v in ema.items()}}, tmp_path / "foreign.pth")
    train(tmp_path / "b", *setting, f"model.checkpoint_path={tmp_path / 'foreign.pth'}", "optimizer.lr=0")
    assert torch.equal(state_of(tmp_path / "b")["model"]["fc.weight"], ema["fc.weight"])
    torch.save({f"other.{k}": v for k, v in ema.items()}, tmp_path / "wrong.pth")
    with pytest.raises(ConfigError, match=r"model\.checkpoint_path=.* lacks bn1"):
        train(tmp_path / "c", *setting, f"model.checkpoint_path={tmp_path / 'wrong.pth'}")


def _die_in_a_save(folder: Path, setting: tuple[str, ...], step: int) -> None:
    from isobatch.checkpoint import folder as layout

    written = layout.HashedFile.write

    def half(self, data):
        view = memoryview(data)
        if dying and self.size + view.nbytes > 1000:
            self.file.write(view.cast("B")[: view.nbytes // 2])
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return written(self, data)

    dying: list[int] = []
    layout.HashedFile.write = half

    def observe(state, parts, window):
        if state.step + 1 == step:
            end = time.monotonic() + 100
            while not all((folder / "checkpoints" / name).exists() for name in ("step-2", "last")) and time.monotonic() < end:
                time.sleep(0.01)  # the save before this one is written beside the training
            dying.append(step)

    train(folder, *setting, "checkpoint.resume=auto", observe=observe)


@pytest.mark.case(23)
def test_case_23_a_kill_during_a_save_leaves_the_checkpoint_before(tmp_path: Path, caplog) -> None:
    setting = (*DIGITS, "steps=6", "eval_every=6", "checkpoint.every=2")
    whole = train(tmp_path / "whole", *setting)
    run = tmp_path / "run"
    for _ in range(3):
        child = mp.get_context("fork").Process(target=_die_in_a_save, args=(run, setting, 4))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["last", "step-2", "tmp"]
        assert state_of(run)["counters"]["step"] == 2
    rest = train(run, *setting, "checkpoint.resume=auto")
    assert rest.weights == whole.weights[2:]
    assert rows(run, "step") == rows(tmp_path / "whole", "step")
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["best", "last", "step-4", "step-6"]
    for name in ("last", "step-6", "best"):
        cut(run / "checkpoints" / name / "state.pt")
    (run / "summary.json").unlink()
    again = train(run, *setting, "checkpoint.resume=auto")
    assert again.weights == whole.weights[4:]
    assert "last is damaged (state.pt has" in caplog.text and "the one before it is used" in caplog.text


@pytest.mark.parametrize(
    ("metric", "scores", "best"),
    [
        ("eval/r2", [0.5, 0.8, 0.7, 0.6], (2, 0.8)),  # the higher the better, as accuracy
        ("eval/loss", [1.0, 0.4, 0.6, 0.9], (2, 0.4)),
        ("eval/loss", [1.0, float("nan"), float("nan"), 1.5], (1, 1.0)),
    ],
)
@pytest.mark.case(24)
def test_case_24_the_best_score_survives_a_resume(tmp_path: Path, monkeypatch, metric, scores, best) -> None:
    script = iter(scores)

    def scripted(self, model, step):
        loss = {"eval/loss": next(script)} if metric == "eval/loss" else {"eval/loss": 1.0, metric: next(script)}
        return {**loss, "eval/samples": 12}

    monkeypatch.setattr(Evaluator, "__call__", scripted)
    setting = (*mean_probe(IDS), "epochs=4", "batch.effective=6", f"checkpoint.best={metric}")
    run = tmp_path / "run"
    train_and_stop(run, 5, *setting)  # in the third epoch
    before = digest(run / "checkpoints/best")
    train(run, *setting, "checkpoint.resume=auto")
    assert summary(run)["best"][metric] == best[1]
    assert digest(run / "checkpoints/best") == before, "a worse model replaced the best one"
    assert state_of(run, "best")["counters"]["step"] == 2 * best[0]
    assert state_of(run)["counters"]["best"][metric] == {"value": best[1], "step": 2 * best[0]}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.case(25)
def test_case_25_the_rest_of_a_run_is_the_rest_of_that_run(tmp_path: Path, world_size) -> None:
    probe = [word for word in mean_probe([i / 12 for i in IDS]) if not word.startswith("model")]
    setting = (*probe, "sampler=shuffle", "epochs=4", "batch.effective=null", "batch.micro=2",
               "batch.shard=null", "model=mlp", "model.width=8",
               "model.drop_rate=0.5", "optimizer.momentum=0.9", "optimizer.lr=0.1", "scheduler=cosine",
               "scheduler.per_epoch=true")  # fmt: skip
    steps, half = 24 // world_size, 12 // world_size

    def job(ranks):
        words = (*setting, *(("parallel=ddp",) if ranks.world_size > 1 else ()))
        whole = train(tmp_path / "whole", *words, f"checkpoint.every={half}", "checkpoint.keep=9", ranks=ranks)
        rest = train(tmp_path / "rest", *words, f"resume={tmp_path / 'whole'}", f"checkpoint.load=step-{half}", ranks=ranks)
        return whole, rest

    found = [job(Ranks())] if world_size == 1 else on_ranks(world_size, tmp_path / "store", job)
    for whole, rest in found:
        assert len(whole.weights) == steps and rest.weights == whole.weights[half:]
        assert sorted(set(rest.lrs), reverse=True) == pytest.approx([0.05, 0.014645], abs=1e-6)
    assert summary(tmp_path / "rest")["steps"] == steps
    losses = rows(tmp_path / "whole", "train/loss")
    assert rows(tmp_path / "rest", "train/loss") == losses[half:]
    assert same(training(state_of(tmp_path / "rest")), training(state_of(tmp_path / "whole")))


HOLDS = ["config", "counters", "ema", "format", "identity", "model", "optimizer", "plan", "reducer", "scaler"]
OPEN = """
import sys, torch
state = torch.load(sys.argv[1])
def plain(value):
    if type(value) is dict: return all(type(k) in (str, int) and plain(v) for k, v in value.items())
    if type(value) is list: return all(map(plain, value))
    return type(value) in (str, int, float, bool, type(None), torch.Tensor)
assert plain(state), "not plain"
assert state["config"]["optimizer"]["lr"] == 0.1 and state["counters"]["step"] == 1
print(",".join(sorted(state)))
"""
ALONE = 'assert "isobatch" not in sys.modules and "omegaconf" not in sys.modules'


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.case(26)
def test_case_26_opens_in_todays_torch_without_this_program(tmp_path: Path, monkeypatch, capsys, cold: bool) -> None:
    """With torch's own types alone; `make test-all` opens it in a process of its own too."""
    setting = (*DIGITS, "steps=2", "optimizer=sgd", "optimizer.lr=0.1", "precision=amp", "ema=ema", "model.norm=true")
    whole = train(tmp_path / "whole", *setting)
    train_and_stop(tmp_path / "run", 1, *setting)
    file = tmp_path / "run/checkpoints/last/state.pt"
    if cold:
        done = subprocess.run([sys.executable, "-c", OPEN + ALONE, str(file)], capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        said = done.stdout
    else:
        capsys.readouterr()
        known = torch.serialization.get_safe_globals()
        monkeypatch.setattr(sys, "argv", ["-c", str(file)])
        torch.serialization.clear_safe_globals()
        try:
            exec(OPEN, {"__name__": "opened"})
        finally:
            torch.serialization.add_safe_globals(known)
        said = capsys.readouterr().out
    assert said.strip() == ",".join(HOLDS)
    assert train(tmp_path / "rest", *setting, f"resume={tmp_path / 'run'}").weights == whole.weights[1:]
