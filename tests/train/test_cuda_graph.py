"""`cuda_graph=true` on the pretended device: a replayed training is the training that is run, or it is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Record, on_ranks, plain, summary, train
from precision_probes import model_of
from pretended import strictly
from pretended.graphs import Graph, recording_graphs

from isobatch import config as configuration
from isobatch.errors import ConfigError, JobFailed
from isobatch.parallel.recorded import AllAtOnce
from isobatch.runtime.distributed import Ranks
from isobatch.train import graph as graph_module
from isobatch.train import loop, recording
from isobatch.train.gradients import Gradients

CUDA = torch.device("cuda", 0)
# a learning rate that float32 holds exactly: while an update is recorded the rate is a float32 tensor
QUIET = ("logger=none", "threads=1", "epochs=null", "steps=7", "eval_every=7", "checkpoint=none", "scheduler=constant",
         "optimizer.lr=0.0009765625", "log_every=3", "batch.eval=90")  # fmt: skip
IMAGES = ("data=synthetic", "data.image_size=16", "data.samples=44", "data.eval_samples=4", "data.num_classes=4",
          "batch.effective=12", "batch.micro=5", "batch.shard=null", "model=timm", "model.arch=test_resnet")  # fmt: skip
CONVOLUTIONS = (*IMAGES[:-2], *model_of("graph_convolutions", lambda info: torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3, 2), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 4, 3, 2),
    torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(36, 4))))  # fmt: skip
SMALL = ("model=mlp", "model.width=8", "model.depth=1", "batch.effective=12", "batch.micro=5", "batch.shard=null")


def slow(*words: str) -> Any:
    return pytest.param(words, marks=pytest.mark.slow)


@pytest.fixture
def graphs(gpu: Any) -> Iterator[list[Graph]]:
    with recording_graphs() as made:
        yield made


def both(folder: Path, *words: str) -> tuple[Record, Record]:
    return tuple(train(folder / name, *QUIET, *words, f"cuda_graph={name}") for name in ("false", "true"))  # type: ignore


@pytest.mark.parametrize("words", [
    (*CONVOLUTIONS,),  # batch norm, shards of 4, a tail window of 8
    slow(*IMAGES),
    (*SMALL, "precision=bf16", "max_grad_norm=0.1", "ema=ema"),
    # 48 px: at 16 the last convolutions see 1 x 1 maps, whose backward in bf16 reads what nobody wrote (oneDNN 3.12)
    slow(*IMAGES, "data.image_size=48", "precision=bf16", "max_grad_norm=0.1", "ema=ema"),
    (*SMALL, "precision=amp", "precision.dtype=float16", "optimizer=sgd"),
    slow(*SMALL, "precision=O2"),
    slow(*IMAGES, "precision=O2"),
    slow(*IMAGES, "precision=O3", "optimizer=sgd"),
    slow(*IMAGES, "augment=mixup", "optimizer=nesterov"),
    slow(*IMAGES, "loss=distill", "loss.teacher.arch=test_resnet"),
    slow(*IMAGES, "loss=jsd"),
    (*SMALL, "model.drop_rate=0.3", "on_nonfinite=skip"),
    slow(*IMAGES, "model.arch=test_vit", "+model.kwargs.drop_rate=0.3", "+model.kwargs.drop_path_rate=0.2",
     "+model.kwargs.img_size=16", "on_nonfinite=skip"),
    slow(*IMAGES, "batch.micro=12", "batch.shard=null", "data.num_workers=1"),
    slow(*SMALL, "optimizer=lamb"),
    (*SMALL, "scheduler=cosine"),
])  # fmt: skip
def test_a_replayed_training_is_the_one_that_is_run(graphs: list[Graph], tmp_path: Path, words: tuple[str, ...]) -> None:
    ran, replayed = both(tmp_path, *words)
    assert sum(graph.replays for graph in graphs) >= 4
    if "scheduler=cosine" in words:  # rates that float32 rounds
        assert torch.allclose(*(torch.tensor(r.weights[-1]) for r in (ran, replayed)), rtol=1e-5, atol=1e-8)
    else:
        assert replayed.weights == ran.weights
    one, other = (summary(tmp_path / name)["final"] for name in ("false", "true"))
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert other[key] == (one[key] if isinstance(one[key], str) else pytest.approx(one[key], rel=1e-6))  # "inf" of fp16


def test_a_replayed_step_is_a_few_launches(graphs: list[Graph], gpu: Any, tmp_path: Path, monkeypatch: Any) -> None:
    counts: list[int] = []
    waits: list[int] = []
    original = loop.train_step

    def counted(*args: Any, **options: Any) -> Any:
        gpu.forget()
        found = original(*args, **options)
        counts.append(gpu.started)
        waits.append(sum(gpu.syncs.values()))
        return found

    monkeypatch.setattr(loop, "train_step", counted)
    words = (*QUIET, *IMAGES, "log_every=100", "steps=9", "eval_every=9", "data.samples=40", "batch.effective=10",
             "batch.micro=10", "batch.shard=null")  # fmt: skip
    for name in ("false", "true"):
        train(tmp_path / name, *words, f"cuda_graph={name}")
    assert counts[7] > 120 and counts[16] < 20, counts
    assert not any(waits[recording.WARM + recording.CHECKED + 9 :])  # the host waits for nothing but the comparisons


def test_the_rate_of_each_step_is_used_and_checkpoints_know_nothing_of_it(graphs: list[Graph], tmp_path: Path) -> None:
    seen: list[Any] = []
    train(tmp_path, *QUIET, *SMALL, "scheduler=cosine", "cuda_graph=true",
          observe=lambda state, *_: seen.append(state.optimizer.state_dict()["param_groups"]))  # fmt: skip
    rates = [groups[0]["lr"] for groups in seen]
    assert all(isinstance(rate, float) for rate in rates) and len(set(rates)) == 7
    assert not any(group["capturable"] for groups in seen for group in groups)


def test_a_run_goes_on_with_and_without_graphs(graphs: list[Graph], tmp_path: Path, caplog: Any) -> None:
    words = (*QUIET, *SMALL, "checkpoint=default", "checkpoint.every=4")
    whole = train(tmp_path / "whole", *words)
    train(tmp_path / "begun", *words, "steps=4", "eval_every=4", "cuda_graph=true")
    assert "cuda_graph=true: micro steps are recorded after two windows and replayed" in caplog.text
    rest = train(tmp_path / "rest", *words, f"resume={tmp_path / 'begun'}", "cuda_graph=false")
    again = train(tmp_path / "again", *words, f"resume={tmp_path / 'begun'}", "cuda_graph=true")
    assert rest.weights[-1] == again.weights[-1] == whole.weights[-1]


def criterion_of(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    from isobatch.loss.losses import CrossEntropy

    original = CrossEntropy.build

    def build(self: Any) -> Any:
        inner = original(self)
        return lambda output, targets: change(inner(output, targets))

    monkeypatch.setattr(CrossEntropy, "build", build)


def test_what_waits_for_the_device_cannot_be_recorded(graphs: list[Graph], tmp_path: Path, monkeypatch: Any) -> None:
    criterion_of(monkeypatch, lambda loss: loss * (1.0 if loss.item() > -1 else 2.0))
    with pytest.raises(JobFailed, match=r"cuda_graph=true: the model or the loss cannot be recorded \(CUDA error: operation "
                       r"not permitted when stream is capturing\); set cuda_graph=false"):  # fmt: skip
        train(tmp_path, *QUIET, *SMALL, "cuda_graph=true")


def test_what_python_decides_is_noticed(graphs: list[Graph], tmp_path: Path, monkeypatch: Any) -> None:
    draws = random.Random(1)
    criterion_of(monkeypatch, lambda loss: loss * draws.random())
    with pytest.raises(JobFailed, match=r"step \d replaying a micro step gave something else .*\(loss .*, replayed .*, grad"):
        train(tmp_path, *QUIET, *SMALL, "cuda_graph=true")


@pytest.mark.parametrize("broken", ["inputs", "scale", "gradients"])
def test_the_comparison_finds_a_broken_recording(graphs: Any, tmp_path: Path, monkeypatch: Any, broken: str) -> None:
    """Each thing that has to be kept in place, once not kept."""
    if broken == "inputs":
        monkeypatch.setattr(recording.Recorded, "load", lambda self, micro, weight, scale: None)
    elif broken == "scale":
        original = recording.Recorded.load
        monkeypatch.setattr(recording.Recorded, "load", lambda self, micro, weight, scale: original(self, micro, weight, 2.0))
    else:
        monkeypatch.setattr(recording.MicroSteps, "_replay", lambda *_: None)
    with pytest.raises(JobFailed, match="replaying a micro step gave something else than running it"):
        train(tmp_path, *QUIET, *SMALL, "cuda_graph=true")


@pytest.mark.parametrize(("words", "line"), [
    (("reduction=exact",), "cuda_graph=True: reduction=exact hands gradients on .*; set reduction=fast"),
    (("parallel=dp",), "cuda_graph=True: nn.DataParallel copies the weights .*; set parallel=ddp"),
    (("parallel=fsdp",), "cuda_graph=True: parallel=fsdp gathers weights"),
    (("compile=reduce-overhead",), "cuda_graph=True: compile=reduce-overhead brings CUDA graphs of its own"),
    (("model=timm", "model.arch=test_resnet", "model.grad_checkpointing=true"), "grad_checkpointing runs forwards again"),
    (("model=timm", "model.arch=test_resnet", "model.batch_norm=sync"), "sends its statistics within the forward"),
])  # fmt: skip
def test_what_cannot_be_recorded_is_refused(words: tuple[str, ...], line: str) -> None:
    config = configuration.load(plain("cuda_graph=true", *words))
    with pytest.raises(ConfigError, match=line):
        graph_module.check(config, 1, CUDA)
    graph_module.check(configuration.load(plain(*words)), 1, CUDA)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_compiled_graphs_own_gradients(mode: str) -> None:
    config = configuration.load(plain(f"compile={mode}"))
    with pytest.raises(ConfigError, match=f"compile={mode}: its CUDA graphs own the gradients that 3 micro steps add up"):
        graph_module.check(config, 3, CUDA)
    with pytest.raises(ConfigError, match=f"compile={mode}: .* that reduction=exact keeps between micro steps; set"):
        graph_module.check(configuration.load(plain(f"compile={mode}", "reduction=exact")), 1, CUDA)
    graph_module.check(config, 1, CUDA)
    graph_module.check(config, 3, torch.device("cpu"))  # it makes none there


def test_without_a_gpu_it_is_refused_before_anything(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cuda_graph=True: records work of CUDA devices, and this run works on cpu; set"):
        train(tmp_path, *QUIET, *SMALL, "cuda_graph=true")
    assert not (tmp_path / "checkpoints").exists()


# -- several ranks -------------------------------------------------------------------------------------------------------
def on_two(folder: Path, *words: str) -> list[Record]:
    def work(ranks: Ranks) -> Record:
        with strictly(2), recording_graphs() as made:
            record = train(folder, *QUIET, *SMALL, "parallel=ddp", *words, ranks=ranks)
            assert (sum(graph.replays for graph in made) >= 6) == ("cuda_graph=true" in words)
            return record

    return on_ranks(2, folder, work)


@pytest.mark.parametrize("words", [
    (), slow("precision=bf16_pure"), slow("parallel.reduce_dtype=bfloat16", "parallel.gradient_predivide=2"),
])  # fmt: skip
def test_ranks_that_replay_train_as_ddp_does(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Three shards on two ranks, and an epoch's tail of two samples that leaves one rank without any."""
    made = (*words, "data=synthetic", "data.image_size=4", "data.samples=26", "data.eval_samples=4", "optimizer=sgd", "steps=9",
            "eval_every=9", "optimizer.lr=0.0009765625")  # fmt: skip
    ran, replayed = (on_two(tmp_path / name, *made, f"cuda_graph={name}") for name in ("false", "true"))
    assert replayed[0].weights == replayed[1].weights
    for step, (one, other) in enumerate(zip(ran[0].weights, replayed[0].weights, strict=True)):
        tolerance = 1e-3 if words else 1e-6
        assert torch.allclose(torch.tensor(one), torch.tensor(other), rtol=tolerance, atol=tolerance), step


class Two(Ranks):
    """Adds what the other rank has: the same."""

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        self.seen.append(tensor.clone())
        return tensor.mul_(2) if op == "sum" else tensor

    seen: list[torch.Tensor] = []


def test_gradients_are_added_in_one_piece_and_in_the_type_that_is_asked_for() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Linear(3, 1)).to(memory_format=torch.channels_last)  # type: ignore
    model[0].weight.grad = torch.randn(3, 2, 3, 3).to(memory_format=torch.channels_last)
    expected = model[0].weight.grad.clone()
    options = configuration.load(plain("parallel=ddp", "parallel.reduce_dtype=bfloat16", "parallel.gradient_predivide=4"))
    gradients = Gradients(model)
    strategy = AllAtOnce(options.parallel, gradients, Two(0, 2, 0, 2))
    strategy.end(model)
    assert [p.grad is None for p in model.parameters()] == [False, True, True, True]
    assert model[0].weight.grad.stride() == model[0].weight.stride()  # laid out as the weight
    assert torch.allclose(model[0].weight.grad, expected * 2, rtol=1e-2)
    (used, sent) = Two.seen
    assert used.tolist() == [1, 0, 0, 0] and sent.dtype == torch.bfloat16
    assert torch.allclose(sent.float(), gradients.flat[0] / 8, rtol=1e-2)  # divided by four before, as asked
    gradients.zero()
    model[1].weight.grad = torch.ones(1, 3)  # a parameter that nobody used in the first window
    view = model[0].weight.grad
    model[0].weight.grad = None
    gradients.reset()
    assert model[0].weight.grad is view and not view.any() and model[1].weight.grad is None
