"""The planner: its estimate against what tensors hold, the cost model, micro batches that matter, what a trial leaves."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from harness import BASE, plain
from live_tensors import LiveTensors

from isobatch import launch
from isobatch.batch_plan import Batch, resolve_batch
from isobatch.config import load
from isobatch.parallel.wire import WholeGradients
from isobatch.planner import cost, estimate, micro
from isobatch.planner.estimate import MB, SavedTensor
from isobatch.planner.preview import AbsentRanks, preview, world
from isobatch.planner.trial import Trial, is_out_of_memory
from isobatch.run import Run
from isobatch.runtime.distributed import Ranks
from isobatch.train.step import train_step

IMAGES = ("logger=none", "threads=1", "data=synthetic", "data.image_size=64", "data.samples=64", "data.eval_samples=4",
          "checkpoint=none")  # fmt: skip
VIT = ("model=timm", "model.arch=vit_tiny_patch16_224", "+model.kwargs.img_size=64", "+model.kwargs.patch_size=16")


def built(folder: Path, *overrides: str) -> Run:
    run = Run(load(plain(*overrides)), folder, Ranks())
    run.build()
    return run


def alive_at_peak(run: Run, windows: int) -> int:
    """Bytes that the tensors of the training steps of `run` hold at most beyond what there is before them."""
    loop = run.loop
    gc.collect()  # what is freed in between must be ours
    with LiveTensors() as tensors:
        for data in loop.feed.windows(0, windows):
            train_step(loop.state, loop.parts, data)
    return tensors.highest


@pytest.mark.parametrize(
    ("model", "micro_batch"),
    [
        pytest.param(("model=resnet18",), 32, marks=pytest.mark.slow),  # one micro step: gradients come while activations go
        pytest.param(
            ("model=resnet18", "optimizer=sgd"), 16, marks=pytest.mark.slow
        ),  # two: the last layers' gradients are there twice, and copied
        (("model=timm", "model.arch=test_convnext", "ema=ema"), 8),  # four micro steps
        pytest.param((*VIT, "optimizer=sgd"), 16, marks=pytest.mark.slow),
    ],
    ids=["resnet18", "resnet18 twice", "test_convnext", "vit_tiny"],
)
def test_the_estimate_is_what_the_tensors_hold(tmp_path: Path, monkeypatch, model, micro_batch) -> None:
    """The copy of a convolution's gradient is inside a kernel, where no tensor is counted: it is looked at by itself."""
    copies: list[int] = []
    real = estimate.peak

    def without_copies(saved: list[SavedTensor], *rest: object) -> int:
        found = real([s._replace(scratch=0) for s in saved], *rest)
        copies.append(real(saved, *rest) - found)
        assert 0 <= copies[-1] <= max(s.scratch for s in saved)
        return found

    monkeypatch.setattr(estimate, "peak", without_copies)
    words = (*IMAGES, *model, "batch.effective=32", f"batch.micro={micro_batch}", "batch.shard=null")
    config = load(plain(*words, "task=plan"))
    splits = config.data.load(None, 0)
    net = config.model.build(splits.info)
    found = preview(config, net, splits, Batch(32, micro_batch, 1), torch.device("cpu"))
    run = built(tmp_path, *words)
    before = estimate.nbytes(estimate.state_of(net)) * (2 if "ema=ema" in words else 1)
    state = run.loop.state.optimizer.state.values()  # fused SGD has its momentum from the start
    before += estimate.nbytes(t for entry in state for t in estimate._tensors(entry))
    measured = (before + alive_at_peak(run, 2)) / MB
    told, (copied,) = found.record["memory_mb"]["peak"], copies
    print(f"{words[-3:]}: {told:.1f} MB (+ {copied / MB:.1f} copied), alive {measured:.1f} MB, {told / measured - 1:+.1%}")
    assert told == pytest.approx(measured, rel=0.02)


def test_what_tensors_hold_is_counted_once_and_until_they_end() -> None:
    with LiveTensors() as tensors:
        a = torch.ones(1000)
        b = a.view(10, 100)[2:]  # the same storage
        assert (tensors.now, tensors.highest) == (4000, 4000)
        c = a * 2 + 1  # a * 2 is gone again
        assert (tensors.now, tensors.highest) == (8000, 12000)
        a.add_(1)
        del a
        assert tensors.now == 8000  # the view keeps it
        del b, c
        assert tensors.now == 0
        x = torch.ones(1000, requires_grad=True)
        y = (x * 3).exp()  # keeps its own result for the backward; the product is kept by nobody
        assert tensors.now == 8000
        y.sum().backward()
        assert tensors.now == 12004 - 4 and tensors.highest >= 16000
        del x, y
    assert tensors.now == 0


def test_the_peak_of_a_backward_worked_out_by_hand() -> None:
    saved = [SavedTensor(100, 0), SavedTensor(0, 8), SavedTensor(60, 0), SavedTensor(0, 2)]
    # after the forward 160 + the last window's 10; at the end of backward step 3: 160 + 60 flowing + 2 = 222;
    # step 2: 160 + 60 + 2 = 222; step 1: 100 + (100 + 60) + 10 = 270; step 0: 100 + 100 + 10
    assert estimate.peak(saved, 10, all_gradients=False) == 270
    # with accumulation the old gradient is there beside each new one: step 1 has 100 + 160 + 10 + 8
    assert estimate.peak(saved, 10, all_gradients=True) == 278
    assert estimate.peak([SavedTensor(100, 0), SavedTensor(0, 8, 8), SavedTensor(60, 0)], 10, all_gradients=True) == 286
    assert estimate.peak([SavedTensor(5, 0)], 1000, all_gradients=False) == 1005


def test_resident_memory_by_optimizer_and_precision() -> None:
    def of(*words: str) -> estimate.Resident:
        config = load(plain(*BASE, "model.norm=true", *words))
        model = config.model.build(config.data.load(None, 0).info)
        found = estimate.resident(config, model, Batch(48, 6, 1))
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert all(p.grad is None for p in model.parameters())
        return found

    n = 64 * 16 + 16 + 2 * 16 + 16 * 10 + 10  # weights of the layers and the norm
    adam = of("optimizer=adamw", "reduction=exact", "reduction.method=tree")
    assert adam.weights == 4 * (n + 2 * 16) + 8 and adam.gradients == 4 * n == adam.wire.gradients
    assert adam.optimizer == 8 * n and not adam.ema and not adam.working
    assert adam.sums == 3 * 4 * n  # 8 shards: up to 4 partial sums at once, one of which is the gradient
    sgd = of("optimizer=sgd", "reduction=exact", "reduction.method=bin64", "ema=ema", "ema.device=cpu")
    assert sgd.optimizer == 4 * n and sgd.sums == 8 * n and sgd.ema == 0
    assert of("optimizer.opt=lbfgs").optimizer is None
    assert of("optimizer.opt=lookahead_adamw").optimizer == 12 * n  # the inner one's two, and the slow weights
    half = of("precision=O2", "ema=ema")
    assert half.working == 2 * (n - 32) and half.gradients == 4 * n and half.weights == adam.weights == half.ema
    assert of("precision=O3").gradients == 2 * n


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_the_micro_batches_that_matter(replicas: int) -> None:
    for effective in range(1, 130):
        found = [batch.micro for batch in micro.candidates(effective, None, replicas)]
        assert found == sorted(set(found), reverse=True) and found[-1] == 1
        by_rule = {resolve_batch(effective, None, steps, replicas).micro for steps in range(1, effective + 1)}
        assert set(found) == by_rule
        for m in found:  # no smaller micro batch has as few micro steps
            steps = Batch(effective, m, replicas).accumulation_steps
            assert m == 1 or Batch(effective, m - 1, replicas).accumulation_steps > steps
    assert micro.candidates(48, 3, replicas) == [resolve_batch(48, None, 3, replicas)]


@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_with_a_stated_shard_the_micro_batches_that_matter_all_cut_the_same(replicas: int) -> None:
    for effective, shard in product(range(1, 130, 7), (1, 4, 8)):
        found = micro.candidates(effective, None, replicas, shard)
        assert {(batch.shard, batch.num_shards) for batch in found} == {(min(shard, effective), -(-effective // shard))}
        steps = [batch.accumulation_steps for batch in found]
        assert steps == sorted(set(steps)) and steps[0] == 1 and found[-1].at_once == 1
        for batch in found:  # none with less in hand takes as few micro steps
            fewer = replace(batch, at_once=max(1, batch.at_once - 1))
            assert batch.at_once == 1 or fewer.accumulation_steps > batch.accumulation_steps
    assert micro.candidates(48, 3, replicas, 8) == [resolve_batch(48, None, 3, replicas, 8)]


@pytest.mark.parametrize("limit", range(50))
def test_bisection_finds_the_largest_that_fits(limit: int) -> None:
    search = micro.MicroSearch.__new__(micro.MicroSearch)
    batches, asked = micro.candidates(48, None, 1), []
    search._fits = lambda batch: asked.append(batch.micro) or batch.micro <= limit  # type: ignore[method-assign]
    assert search.first_that_fits(batches) == sum(batch.micro > limit for batch in batches)
    assert asked[0] == 48 and len(asked) <= 6


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) and not is_out_of_memory(OSError())


def test_a_trial_leaves_nothing_behind() -> None:
    config = load(plain(*BASE, "model.norm=true", "model.drop_rate=0.5"))
    splits = config.data.load(None, 0)
    model = config.model.build(splits.info)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    trial = Trial(config, model, splits, torch.device("cpu"), 1000)
    assert trial.fits(8, 2) and trial.saved(4) and trial.timed(4).sample_s > 0
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in (*model.parameters(), *trial.working.module.parameters()))


def test_the_ring_and_the_table_worked_out_by_hand() -> None:
    options = cost.CostOptions(bandwidth_gb_s=2.0, latency_us=50.0)
    wire = WholeGradients(10**9)
    assert cost.seconds(options, wire.window(1, 1)[0].backward) == 0
    # 4 replicas: 6 messages of a quarter of 1 GB at 2 GB/s, and 6 times 50 us
    assert cost.seconds(options, wire.window(4, 1)[0].backward) == pytest.approx(6 * 0.125 + 6 * 50e-6)
    measured = cost.Measured(samples=8, forward_s=0.1, backward_s=0.3)  # 50 ms a sample, 37.5 of them backward
    row = cost.row(Batch(64, 8, 4), 4, measured, wire, options)
    assert (row.replicas, row.micro_batch, row.accumulation_steps) == (4, 8, 2)
    assert row.compute_ms == pytest.approx(800) and row.network_ms == pytest.approx(750.3)
    assert row.update_ms == pytest.approx(800 + 750.3 - 300)  # the last backward hides 8 samples' worth
    assert row.efficiency == pytest.approx(3200 / (4 * 1250.3)) and row.grown == pytest.approx(3200 / (3200 + 450.3))
    wide = cost.row(Batch(64, 8, 4), 128, measured, wire, options)
    assert (wide.micro_batch, wide.accumulation_steps) == (1, 1) and wide.compute_ms == pytest.approx(50)
    rows = cost.rows(Batch(64, 8, 5), measured, wire, options)
    assert [r.replicas for r in rows] == [1, 2, 4, 5, 8, 16, 64, 256, 1024, 4096]
    assert rows[0].efficiency == rows[0].grown == 1
    assert all(len(line) == len(cost.HEAD) for line in cost.table(rows))


def test_the_world_that_is_planned_for() -> None:
    config = load(plain("task=plan", "parallel=ddp", "parallel.nproc=64"))
    absent = world(config, Ranks())
    assert isinstance(absent, AbsentRanks) and absent.world_size == 64 == absent.local_world_size and absent.is_main
    assert absent.agree(3) == 3 and absent.gather_objects("x") == ["x"] and absent.broadcast_object("y") == "y"
    there = Ranks(1, 2, 1, 2)  # torchrun has started some
    assert world(config, there) is there
    assert world(load({**config.plain, "task": "train"}), Ranks()) == Ranks()


def test_a_plan_for_64_processes_starts_none(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(launch.spawn, "run_ranks", lambda *args: pytest.fail("started ranks"))
    launch.run(plain(*BASE, "task=plan", "parallel=ddp", "parallel.nproc=64", "batch.effective=256", "batch.shard=4",
                     "model.width=512", "cost.bandwidth_gb_s=10"), tmp_path)  # fmt: skip
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["world_size"], plan["num_replicas"], plan["micro_batch"], plan["accumulation_steps"]) == (64, 64, 4, 1)
    assert plan["memory_mb"]["peak"] > plan["memory_mb"]["activations"] > 0
    assert [r["replicas"] for r in plan["cost"]["rows"]] == list(cost.REPLICAS)
    said = capsys.readouterr().out
    assert "DDP over 64 rank(s)" in said and "at the peak" in said and "4,096" in said


def test_a_training_pays_for_no_extra_forward(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Trial, "__init__", lambda *args: pytest.fail("a trial"))
    built(tmp_path, *BASE, "cost.bandwidth_gb_s=10", "batch.effective=8")
    assert "without activations" in capsys.readouterr().out
    assert "cost" not in json.loads((tmp_path / "plan.json").read_text())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_estimate_on_cuda(tmp_path: Path) -> None:
    words = (*IMAGES, "model=resnet18", "batch.effective=64", "batch.micro=64", "data.samples=128")
    config, device = load(plain(*words, "task=plan")), torch.device("cuda:0")
    splits = config.data.load(None, 0)
    found = preview(config, config.model.build(splits.info), splits, Batch(64, 64, 1), device)
    run = built(tmp_path, *words)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for data in run.loop.feed.windows(0, 2):
        train_step(run.loop.state, run.loop.parts, data)
    net = estimate.nbytes(estimate.state_of(run.loop.state.model))
    assert found.record["memory_mb"]["peak"] == pytest.approx(
        (torch.cuda.max_memory_allocated() - held + net) / MB, rel=0.15)  # fmt: skip
