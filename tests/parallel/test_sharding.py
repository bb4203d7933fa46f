"""parallel=fsdp beside plain training: checkpoints, average, teacher, precision, what is cut, what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import state_of, training
from harness import BASE, on_ranks, plain, rows, summary, train
from parallel.test_sharding_frozen import Net
from precision_probes import QUIET, SometimesUnused, data_of, model_of
from torch import Tensor, nn

from isobatch import config as configuration
from isobatch.errors import ConfigError
from isobatch.parallel.blocks import choose_blocks, largest_pieces
from isobatch.precision.scaling import LossScaler
from isobatch.run import Run
from isobatch.runtime.distributed import Ranks
from isobatch.runtime.dtensor import like, whole

DIGITS = (*BASE, "epochs=null", "log_every=1", "batch.effective=40", "batch.micro=8", "model.norm=true", "ema=ema",
          "ema.decay=0.9", "eval_every=100", "optimizer=sgd", "optimizer.lr=0.05", "max_grad_norm=1",
          "batch.eval=90")  # fmt: skip
TIMM = ("model=timm", "logger=none", "threads=1", "scheduler=constant", "data=synthetic", "data.samples=40",
        "data.eval_samples=8", "data.image_size=32", "batch.effective=20", "batch.micro=8", "epochs=null", "steps=2",
        "log_every=1", "optimizer=sgd", "optimizer.lr=0.05", "max_grad_norm=0.5", "checkpoint=none",
        "sampler.tail=drop")  # fmt: skip


def structure(value: Any) -> Any:
    """A saved state without its numbers."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, dict):
        return [(key, structure(inner)) for key, inner in value.items()]
    return [structure(inner) for inner in value] if isinstance(value, list) else type(value)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((a[key].double() - b[key].double()).abs().max().item() for key in a)


def test_a_run_moves_between_strategies_and_stays_the_same_run(tmp_path: Path) -> None:
    """ddp -> fsdp (3 ranks, uneven) -> single in mid-run, with optimizer state, average and statistics (cases 18, 25)."""
    words = (*DIGITS, "steps=3", "checkpoint.every=1", "checkpoint.keep=9")
    train(tmp_path / "whole", *words)
    on_ranks(2, tmp_path / "ddp", lambda ranks: train(tmp_path / "ddp", *words, "parallel=ddp", ranks=ranks))

    def go_on(ranks: Ranks) -> None:
        train(tmp_path / "fsdp", *words, "parallel=fsdp", f"resume={tmp_path / 'ddp'}", "checkpoint.load=step-1", ranks=ranks)

    on_ranks(3, tmp_path / "fsdp", go_on)
    train(tmp_path / "single", *words, f"resume={tmp_path / 'fsdp'}", "checkpoint.load=step-2")
    expected = training(state_of(tmp_path / "whole", "step-2"))
    moved = training(state_of(tmp_path / "fsdp", "step-2"))
    for state in (moved, expected):  # which kernel updates is the plan's
        state["optimizer"]["param_groups"] = [group["params"] for group in state["optimizer"]["param_groups"]]
    assert structure(moved) == structure(expected), "a checkpoint does not tell who wrote it"
    assert distance(moved["model"], expected["model"]) < 1e-6 > distance(moved["ema"], expected["ema"])
    for number, entry in expected["optimizer"]["state"].items():
        assert distance(moved["optimizer"]["state"][number], entry) < 1e-6
    last, there = training(state_of(tmp_path / "whole")), training(state_of(tmp_path / "single"))
    assert distance(there["model"], last["model"]) < 1e-6
    assert rows(tmp_path / "single", "train/loss") == pytest.approx(rows(tmp_path / "whole", "train/loss")[2:], abs=1e-6)


@pytest.mark.case(18)
def test_case_18_a_sharded_run_evaluates_what_others_saved_and_digests_its_whole_weights(tmp_path: Path) -> None:
    words = (*DIGITS, "steps=2", "sweep.tolerance=1e-5")
    train(tmp_path / "a", *words)

    def work(ranks: Ranks) -> int:
        train(tmp_path / "b", *words, "parallel=fsdp", "task=evaluate", f"resume={tmp_path / 'a'}", ranks=ranks)
        train(tmp_path / "c", *words, "parallel=fsdp", ranks=ranks)
        return 0

    on_ranks(3, tmp_path / "ranks", work)
    assert rows(tmp_path / "b", "eval/loss") == rows(tmp_path / "a", "eval/loss")
    assert summary(tmp_path / "b")["weights_sha256"] == summary(tmp_path / "a")["weights_sha256"] is not None
    first = [json.loads((tmp_path / name / "fingerprint.json").read_text()) for name in "ac"]
    assert all(first[0][key] == first[1][key] for key in first[0] if key.startswith("0/")), "ranks that only take part"
    assert first[0].keys() == first[1].keys()


@pytest.mark.parametrize(("words", "tolerance"), [
    pytest.param(("model.arch=test_vit", "+model.kwargs.img_size=32", "model.grad_checkpointing=true", "precision=O2"), 1e-6,
                 marks=pytest.mark.slow),
    pytest.param(("model.arch=test_resnet", "data.image_size=48", "precision=bf16_pure", "channels_last=true"), 2e-4,
                 marks=pytest.mark.slow),
    (("precision=bf16_pure", "channels_last=true"), 2e-4),  # masters in half would be off by 4e-3
], ids=["vit", "resnet", "convolutions"])  # fmt: skip
def test_half_weights_are_gathered_from_fp32_masters(tmp_path: Path, words: tuple[str, ...], tolerance: float) -> None:
    common = TIMM
    if words[0] == "precision=bf16_pure":
        common = (*(word for word in TIMM if not word.startswith(("model", "data.image"))), "data.image_size=8",
                  "data.in_chans=1", *model_of("half_parts", lambda info: Net()))  # fmt: skip
    alone = train(tmp_path / "alone", *common, *words)

    def work(ranks: Ranks) -> tuple[Any, set[Any]]:
        dtypes: set[Any] = set()

        def look(state: Any, parts: Any, window: Any) -> None:
            dtypes.update((p.dtype, p.to_local().numel() <= -(-p.shape[0] // 2) * p[0].numel()) for p in state.parameters)

        return train(tmp_path / "two", *common, *words, "parallel=fsdp", ranks=ranks, observe=look), dtypes

    for record, dtypes in on_ranks(2, tmp_path / "ranks", work):
        assert dtypes == {(torch.float32, True)}
        # in bf16 4e-3, a rounding: where a kernel cuts its sums depends on the samples it sees, and on the CPU
        assert record.norms == pytest.approx(alone.norms, rel=20 * tolerance)
        assert max(abs(a - b) for a, b in zip(record.weights[-1], alone.weights[-1], strict=True)) < tolerance


def test_an_evaluation_lets_go_of_the_whole_weights(tmp_path: Path) -> None:

    def work(ranks: Ranks) -> list[bool]:
        words = (*DIGITS, "steps=1", "checkpoint=none", "parallel=fsdp", "parallel.blocks=[]")  # kept till a backward
        made = Run(configuration.load(plain(*words)), tmp_path, ranks)
        made.build()
        model, evaluator, whole = made.loop.state.model, made.loop.evaluator, []
        for evaluate in (evaluator, lambda model: evaluator.first(model, 4)):
            evaluate(model)
            whole += [not hasattr(p, "full_tensor") for p in model.parameters()]
        made.finish("stopped", None)
        return whole

    for found in on_ranks(2, tmp_path / "ranks", work):
        assert found and not any(found)


def test_all_ranks_see_an_overflow_that_lies_in_one_part(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> tuple[bool, float]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        gradient = torch.ones(4, 2)
        gradient[3, 1] = float("inf")  # the second rank's
        weight.grad = like(gradient, weight)
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0), LossScaler(1024.0)
        scaler.unscale_(optimizer)
        return scaler.step(optimizer), float(whole(weight).sum())

    assert on_ranks(2, tmp_path, work) == [(False, 8.0)] * 2


def test_a_branch_that_some_shards_miss_is_told_and_left_alone_on_request(tmp_path: Path) -> None:
    """`second` gets no gradient from negative rows; one process leaves it alone then, decay and momentum included."""
    inputs = torch.tensor([[1.0, 0.5], [-2.0, 1.0], [-3.0, 1.5], [-4.0, 2.0]]) / 10
    words = (*QUIET, *model_of("sometimes_sharded", lambda info: SometimesUnused()),
             *data_of("four_rows", inputs, torch.arange(4.0).unsqueeze(1)), "optimizer=sgd", "optimizer.weight_decay=0.1",
             "optimizer.decay_norms_and_biases=true", "optimizer.lr=0.01", "loss=mse", "steps=4", "eval_every=9",
             "batch.effective=2", "batch.micro=1", "batch.shard=null", "checkpoint=none")  # fmt: skip
    alone = train(tmp_path / "alone", *words)

    def work(ranks: Ranks) -> list[Any]:
        return [train(tmp_path / str(find), *words, "parallel=fsdp", f"parallel.find_unused_parameters={find}", ranks=ranks)
                for find in ("auto", "true")]  # fmt: skip

    for found in zip(*on_ranks(2, tmp_path / "ranks", work), strict=True):
        for record in found:
            for ours, theirs in zip(record.weights, alone.weights, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-6)


@pytest.mark.case(19)
def test_case_19_a_teacher_is_never_cut(tmp_path: Path) -> None:
    from loss.test_loss import TAUGHT, WORDS, run_with_teacher

    def work(ranks: Ranks) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            words = (*WORDS, *TAUGHT, "parallel=fsdp", "parallel.find_unused_parameters=false")
            return run_with_teacher(tmp_path / "together", words, ranks, patch)

    found = on_ranks(2, tmp_path / "together", work)
    assert [(f["unchanged"], f["training"], f["trainable"]) for f in found] == [(True, False, False)] * 2
    alone = train_value(tmp_path / "alone", (*WORDS, *TAUGHT))
    assert found[0]["value"] == pytest.approx(alone)


def train_value(folder: Path, words: tuple[str, ...]) -> Any:
    from isobatch import run

    folder.mkdir()
    return run.run_job(plain(*words), folder, Ranks())


@pytest.mark.parametrize(("words", "key"), [
    (("reduction=exact",), "reduction.name"),
    (("ema=ema", "ema.device=cpu"), "ema.device"),
    (("model.batch_norm=sync",), "model.batch_norm"),
    (("parallel.shard_size=2", "parallel.nproc=3"), "parallel.shard_size"),
    (("parallel.shard_size=half",), "parallel.shard_size"),
    (("parallel.blocks=layers",), "parallel.blocks"),
    (("parallel.reshard_between_micro_steps=false",), "parallel.reshard_between_micro_steps"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_the_config_alone(words: tuple[str, ...], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        configuration.load(plain("parallel=fsdp", *words))
    assert refusal.value.key == key and refusal.value.way_out


def test_a_shard_size_that_does_not_divide_the_ranks_is_refused() -> None:
    config = configuration.load(plain("parallel=fsdp", "parallel.shard_size=node"))
    with pytest.raises(ConfigError, match="does not divide 3 ranks"):
        config.parallel.check(Ranks(0, 3, 0, 2))
    assert config.parallel.describe(Ranks(0, 4, 0, 2), torch.device("cpu")).endswith("weights in 2 part(s) x 2 copies")


def test_models_that_cannot_be_cut_are_refused_in_words(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self, scalar: bool):
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.factor = nn.Parameter(torch.tensor(1.0)) if scalar else 1.0
            self.register_buffer("table", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * self.table.to(x.dtype)) * self.factor

    data = data_of("two_rows", torch.ones(4, 2), torch.ones(4, 1))
    words = (*QUIET, "loss=mse", "optimizer=sgd", "steps=1", "batch.effective=4", *data, "parallel=fsdp")

    def work(ranks: Ranks) -> list[str]:
        said = []
        for name, scalar, more in (("scalar", True, ()), ("table", False, ("precision=bf16_pure",)),
                                   ("block", False, ("parallel.blocks=[tail]",)),
                                   ("fused", False, ("optimizer.fused=true",))):  # fmt: skip
            model = model_of(f"odd_{name}", lambda info, scalar=scalar: Odd(scalar))
            with pytest.raises(ConfigError) as refusal:
                train(tmp_path / name, *words, *model, *more, ranks=ranks)
            said.append(refusal.value.key)
        return said

    expected = ["parallel.name", "parallel.name", "parallel.blocks", "optimizer.fused"]
    assert on_ranks(2, tmp_path / "ranks", work) == [expected] * 2


def once(model: nn.Module) -> dict[str, int]:
    return dict.fromkeys(dict(model.named_modules()), 1)


def test_blocks_are_what_a_model_lists() -> None:
    class Block(nn.Module):  # as timm's: a small list inside does not make it a stage
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.down = nn.Conv2d(8, 8, 3), nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.blocks = nn.BatchNorm2d(8), nn.Sequential(Block(), Block())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.layer = nn.Conv2d(3, 8, 3), nn.Sequential(Block(), nn.ReLU(), Block())
            self.stages, self.tiny = nn.ModuleList([Stage(), Stage()]), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    net = Net()
    found = ["layer.0", "layer.2", "stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0", "stages.1.blocks.1"]
    assert choose_blocks(net, "auto", once(net)) == found
    assert choose_blocks(net, "auto", {**once(net), "layer.0": 2, "layer.2": 0}) == found[2:], "called once, or with the rest"
    assert sorted(choose_blocks(net, ["layer.*", "stages.*"], once(net))) == ["layer.0", "layer.2", "stages.0", "stages.1"]
    assert choose_blocks(net, ["stages.*.blocks.*", "stages.*"], once(net))[-2:] == ["stages.0", "stages.1"], "inner first"
    assert choose_blocks(net, [], once(net)) == []
    with pytest.raises(ConfigError, match="names no module with weights"):
        choose_blocks(net, ["layers.*"], once(net))
    with pytest.raises(ConfigError, match="is not called once"):
        choose_blocks(net, ["layer.0"], {})
    block = sum(p.nbytes for p in net.layer[0].parameters())
    total = sum(p.nbytes for p in net.parameters())
    assert largest_pieces(net, "auto", True) == (total - 4 * block, max(block, total - 6 * block))
    assert largest_pieces(net, "auto", False)[0] == total


def test_the_plan_counts_the_parts(tmp_path: Path) -> None:
    words = ("task=plan", "logger=none", "model=mlp", "model.depth=4", "model.width=1024", "optimizer=adamw")
    memory = {}
    for name, more in {"ddp": ("parallel=ddp", "parallel.nproc=4"), "fsdp": ("parallel=fsdp", "parallel.nproc=4")}.items():
        train(tmp_path / name, *words, *more)
        memory[name] = json.loads((tmp_path / name / "plan.json").read_text())
    ours, theirs = memory["fsdp"]["memory_mb"], memory["ddp"]["memory_mb"]
    for part in ("weights", "gradients", "optimizer"):
        assert ours[part] == pytest.approx(theirs[part] / 4, rel=0.01), part
    assert 0 < ours["gathered"] < theirs["weights"] + theirs["gradients"] and ours["peak"] < theirs["peak"]
    assert memory["fsdp"]["parallel"] == "FSDP over 4 ranks, cpu: weights in 4 part(s)"


def test_one_rank_keeps_its_weights_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = (*DIGITS, "steps=2")
    with caplog.at_level(logging.INFO):
        assert train(tmp_path / "b", *words, "parallel=fsdp").weights == train(tmp_path / "a", *words).weights
