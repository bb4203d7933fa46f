"""Distillation (case 19), binary cross entropy and Jensen-Shannon: right values, and a teacher that nobody touches."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import on_ranks, plain, summary
from torch import nn
from torch.nn import functional

from isobatch import checkpoint, config, run
from isobatch.data import DataInfo
from isobatch.errors import ConfigError
from isobatch.loss import BinaryCrossEntropy, Distillation, JensenShannon
from isobatch.loss.distill import Taught
from isobatch.loss.views import Viewed, Views
from isobatch.resume import teacher as teachers
from isobatch.runtime.distributed import Ranks
from isobatch.shards.layout import Lanes

WORDS = ("logger=none", "threads=1", "model=mlp", "model.width=8", "epochs=null", "steps=4", "eval_every=2", "log_every=1",
         "batch.effective=8", "batch.micro=2", "batch.shard=null", "checkpoint.every=4")  # fmt: skip
TAUGHT = ("loss=distill", "loss.teacher.arch=test_resnet")


def digest(module: nn.Module) -> str:
    return hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in module.state_dict().values())).hexdigest()


def run_with_teacher(folder: Path, words: tuple[str, ...], ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Train, and return what became of the teacher."""
    built: list[tuple[nn.Module, str]] = []
    original = teachers.build

    def build(*args: Any) -> nn.Module:
        network = original(*args)
        built.append((network, digest(network)))
        return network

    monkeypatch.setattr(teachers, "build", build)
    folder.mkdir(parents=True, exist_ok=True)
    value = run.run_job(plain(*words), folder, ranks)
    ((network, before),) = built
    return {"unchanged": digest(network) == before, "training": any(m.training for m in network.modules()),
            "trainable": any(p.requires_grad or p.grad is not None for p in network.parameters()), "value": value}  # fmt: skip


@pytest.mark.parametrize("words", [("parallel=single", "precision=fp32"), ("parallel=dp", "precision=amp"),
                                   *(pytest.param(("parallel=single", f"precision={level}"), marks=pytest.mark.slow)
                                     for level in ("O2", "O3"))])  # fmt: skip
@pytest.mark.case(19)
def test_a_teacher_is_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    images = "data=synthetic", "data.samples=32", "data.eval_samples=8", "data.image_size=48"  # a 3 x 3 of halves needs 2 x 2
    found = run_with_teacher(tmp_path, (*WORDS, *images, *TAUGHT, *words), Ranks(), monkeypatch)
    assert (found["unchanged"], found["training"], found["trainable"]) == (True, False, False)
    state = checkpoint.load(tmp_path)
    assert all("conv" not in key for key in state["model"]), "the teacher is in the checkpoint"
    assert summary(tmp_path)["state"] == "completed"


@pytest.mark.case(19)
def test_a_teacher_under_ddp_needs_no_setting(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            words = (*WORDS, *TAUGHT, "parallel=ddp", "parallel.find_unused_parameters=false")
            return run_with_teacher(tmp_path / "together", words, ranks, patch)

    found = on_ranks(2, tmp_path / "together", work)
    assert [(f["unchanged"], f["training"], f["trainable"]) for f in found] == [(True, False, False)] * 2
    (tmp_path / "alone").mkdir()
    alone = run.run_job(plain(*WORDS, *TAUGHT), tmp_path / "alone", Ranks())
    assert found[0]["value"] == pytest.approx(alone)


def test_a_run_of_this_program_teaches(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run.run_job(plain(*WORDS, "model.width=16", "ema=ema"), tmp_path / "a", Ranks())
    info = DataInfo("digits", (1, 8, 8), 10)
    network = teachers.build({"checkpoint": str(tmp_path / "a")}, info, torch.device("cpu"))
    state = checkpoint.load(tmp_path / "a")
    assert all(torch.equal(value, state["ema"][key]) for key, value in network.state_dict().items())
    run.run_job(plain(*WORDS, "loss=distill", f"loss.teacher.checkpoint={tmp_path / 'a'}"), tmp_path / "b", Ranks())
    assert summary(tmp_path / "b")["state"] == "completed"


def test_a_teacher_needs_no_file_that_its_own_run_began_with(tmp_path: Path) -> None:
    model = ("logger=none", "threads=1", "model=timm", "model.arch=test_resnet", "data=synthetic", "data.samples=8",
             "data.eval_samples=2", "data.image_size=16", "batch.effective=4", "epochs=null", "steps=1")  # fmt: skip
    first = tmp_path / "first.pth"
    torch.save(teachers.build({"arch": "test_resnet", "pretrained": False, "checkpoint": None, "kwargs": {}},
                             DataInfo("synthetic", (3, 16, 16), 10), torch.device("cpu")).state_dict(), first)  # fmt: skip
    for name, words in (("a", (f"model.checkpoint_path={first}",)),
                        ("b", ("loss=distill", f"loss.teacher.checkpoint={tmp_path / 'a'}"))):  # fmt: skip
        (tmp_path / name).mkdir()
        run.run_job(plain(*model, *words), tmp_path / name, Ranks())
        first.unlink(missing_ok=True)
    assert summary(tmp_path / "b")["state"] == "completed"


def test_the_loss_is_hintons() -> None:
    criterion = Distillation(temperature=3.0, weight=0.25, teacher={"arch": "resnet18"}).build()
    output, logits, labels = torch.randn(5, 4), torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    p, q = functional.softmax(logits / 3, 1), functional.softmax(output / 3, 1)
    kl = (p * (p / q).log()).sum(1).mean()
    expected = 0.75 * functional.cross_entropy(output, labels) + 0.25 * 9 * kl
    assert criterion(output, Taught(labels, logits)).item() == pytest.approx(expected.item(), rel=1e-5)
    assert criterion(output, labels).item() == pytest.approx(functional.cross_entropy(output, labels).item())
    # the mean over shards is the mean over their samples: any cut is the same loss
    parts = [criterion(output[a:b], Taught(labels[a:b], logits[a:b])) * (b - a) / 5 for a, b in ((0, 2), (2, 5))]
    assert sum(parts).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "key"),
    [({}, "arch"), ({"arch": "resnet18", "checkpoint": "x"}, "arch"), ({"arch": "resnet18", "size": 3}, "size")],
)
def test_a_teacher_has_to_be_named(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"loss.teacher.{key}"):
        Distillation(teacher=options)


def test_a_teacher_that_does_not_exist_is_refused_under_its_own_name() -> None:
    info = DataInfo("digits", (1, 8, 8), 10)
    options = {"arch": "resnet1818", "pretrained": False, "checkpoint": None, "kwargs": {}}
    with pytest.raises(ConfigError, match=r"loss.teacher.arch=resnet1818"):
        teachers.build(options, info, torch.device("cpu"))


def test_building_a_teacher_draws_nothing_from_the_run() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    options = {"arch": "test_resnet", "pretrained": False, "checkpoint": None, "kwargs": {}}
    teachers.build(options, DataInfo("digits", (1, 8, 8), 10), torch.device("cpu"))
    assert torch.equal(torch.rand(1), expected)


def test_binary_cross_entropy_takes_classes_and_probabilities() -> None:
    output, labels = torch.randn(3, 4), torch.tensor([0, 3, 1])
    hot = functional.one_hot(labels, 4).float()
    expected = functional.binary_cross_entropy_with_logits(output, hot)
    criterion = BinaryCrossEntropy().build()
    assert criterion(output, labels).item() == pytest.approx(expected.item())
    assert criterion(output, hot).item() == pytest.approx(expected.item())
    summed = BinaryCrossEntropy(sum_classes=True).build()
    assert summed(output, labels).item() == pytest.approx(4 * expected.item())


def test_views_depend_on_the_shard_alone() -> None:
    inputs, labels = torch.randn(5, 1, 8, 8), torch.arange(5)
    views = Views(None, 3, 0.1, 0.125, seed=1)
    both, targets = views(inputs, labels, 7, (2, 3), Lanes.alone((3, 2)))
    assert both.shape == (15, 1, 8, 8) and torch.equal(both[:3], inputs[:3]) and torch.equal(both[9:11], inputs[3:])
    alone, _ = views(inputs[3:], labels[3:], 7, (3,), Lanes.alone((2,)))
    assert torch.equal(both[9:], alone)
    criterion = JensenShannon(alpha=12.0).build()
    output = torch.randn(15, 10)
    parts = [criterion(part, Viewed(label, Lanes.alone((len(label),)))) * len(label) / 5
             for part, label in ((output[:9], labels[:3]), (output[9:], labels[3:]))]  # fmt: skip
    assert criterion(output, targets).item() == pytest.approx(sum(parts).item(), rel=1e-5)


@pytest.mark.parametrize("loss", ["bce", "jsd"])
def test_these_losses_train(tmp_path: Path, loss: str) -> None:
    run.run_job(
        plain(
            *WORDS,
            f"loss={loss}",
            "steps=40",
            "eval_every=40",
            "batch.effective=64",
            "batch.micro=32",
            "model.width=32",
            "optimizer.lr=0.02",
        ),
        tmp_path,
        Ranks(),
    )
    assert summary(tmp_path)["final"]["eval/accuracy"] > 0.2


def test_presets_load() -> None:
    assert config.load(plain("loss=jsd")).loss.num_splits == 3
    assert config.load(plain("loss=bce")).loss.averages
    with pytest.raises(ConfigError, match=r"loss\.teacher\.arch"):
        config.load(plain("loss=distill"))


@pytest.mark.parametrize(("name", "more"), [("cross_entropy", {}), ("bce", {"target_threshold": 0.1}), ("jsd", {}),
                                            ("distill", {"teacher": {"arch": "x"}})])  # fmt: skip
def test_an_evaluation_is_of_the_plain_loss(name: str, more: dict[str, Any]) -> None:
    """Smoothing makes training's loss of a sure and right answer large; the evaluation's is next to nothing."""
    options = config.options("loss", {"name": name, "label_smoothing": 0.4, **more})
    output, targets = 30 * torch.eye(3) - 15, torch.arange(3)
    assert float(options.build()(output, targets)) > 0.4 and float(options.evaluation()(output, targets)) < 0.001
    assert options.label_smoothing == 0.4


def test_a_run_with_smoothing_reports_the_plain_loss(tmp_path: Path) -> None:
    from harness import rows, train

    words = (*WORDS, "checkpoint.every=null")
    for smoothing in (0, 0.4):
        train(tmp_path / str(smoothing), *words, f"loss.label_smoothing={smoothing}", "optimizer.lr=0")
    assert rows(tmp_path / "0", "eval/loss") == rows(tmp_path / "0.4", "eval/loss")
    assert rows(tmp_path / "0", "train/loss") != rows(tmp_path / "0.4", "train/loss")


@pytest.mark.parametrize("task", ["train", "plan"])
def test_weights_that_are_not_one_for_each_class_are_named(tmp_path: Path, task: str) -> None:
    words = (f"task={task}", "model=linear", "logger=none", "loss.class_weights=[1,2]")
    with pytest.raises(ConfigError, match=r"loss\.class_weights=\[1\.0, 2\.0\]: has 2 weights, and the model 10 classes"):
        run.run_job(plain(*words), tmp_path, Ranks())


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_plan_says_in_one_line_that_the_loss_takes_no_such_output(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"loss\.name=mse: the loss cannot take .*float32 \[48, 10\], with targets int64 \[48\]"
    ):
        run.run_job(plain("task=plan", "model=linear", "logger=none", "loss=mse"), tmp_path, Ranks())
