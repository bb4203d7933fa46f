"""Weights by elements: every plan gives what the whole window in one forward gives with torch's own mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import on_ranks, plain
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import isobatch
from isobatch import config, data, loss, model
from isobatch.errors import ConfigError, JobFailed
from isobatch.given import Sum, mean_of
from isobatch.loss.elements import ElementCrossEntropy, FocalLoss, by_elements
from isobatch.run import Run
from isobatch.runtime.distributed import Ranks

CLASSES, LENGTH = 5, 6
ALONE = Ranks()
WEIGHTS = [0.2, 1.0, 3.0, 0.5, 2.0]


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """Token lines of very different lengths, padded; 22 in all, so that windows of 9 end in one of 4."""

    def __init__(self, empty: tuple[int, ...] = ()):
        draw = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(22, 3, LENGTH, generator=draw, dtype=torch.float64)
        self.labels = torch.randint(0, CLASSES, (22, LENGTH), generator=draw)
        for i in range(22):
            self.labels[i, 1 + i % LENGTH :] = -100
            if i in empty:
                self.labels[i] = -100

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


def register(group: Any, name: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test alone: the tables stay as they were."""
    monkeypatch.setattr(group, "TABLE", dict(group.TABLE))
    monkeypatch.setattr(config.loading, "TABLES", {**config.loading.TABLES})
    config.loading.TABLES[group.__name__.rsplit(".", 1)[-1]] = group.TABLE
    isobatch.register(group.__name__.rsplit(".", 1)[-1], name, kind)


def network(num_classes: int, in_chans: int) -> nn.Module:
    return nn.Conv1d(3, CLASSES, 1, dtype=torch.float64)


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    register(data, "test_lines", lambda split, empty=(): Lines(tuple(empty)), monkeypatch)
    register(model, "test_tokens", network, monkeypatch)


WORDS = ("logger=none", "threads=1", "scheduler=constant", "data=custom", "data.name=test_lines", "data.num_classes=5",
         "data.num_workers=0", "model=custom", "model.name=test_tokens", "optimizer=sgd", "optimizer.lr=0.1",
         "optimizer.momentum=0", "optimizer.weight_decay=0", "epochs=null", "steps=3", "eval_every=3", "log_every=1",
         "batch.effective=9", "batch.shard=null", "checkpoint=none", "sampler=sequential")  # fmt: skip
PLANS = {"single": (1, "batch.micro=2"), "together": (1, "batch.shard=2", "batch.micro=6"),
         "dp": (1, "parallel=dp", "parallel.replicas=2", "batch.micro=2"),
         "ddp2": (2, "parallel=ddp", "batch.micro=2"), "ddp3": (3, "parallel=ddp", "batch.micro=3"),
         "ddp4": (4, "parallel=ddp", "batch.micro=2")}  # fmt: skip


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def trained(folder: Path, words: tuple[str, ...], ranks: Ranks = ALONE, made: Any = None) -> tuple[Any, ...]:
    """(weights, rows, skipped) of a training in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(config.load(made or plain(*WORDS, *words)), folder, ranks)
    run.build()
    run.perform()
    run.finish("completed", None)
    assert run.loop is not None
    state = run.loop.state
    flat = torch.cat([whole(p.detach()).reshape(-1).double() for p in state.parameters]).tolist()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] if ranks.is_main else []
    return flat, rows, state.skipped_steps


def on_plan(name: str, folder: Path, words: tuple[str, ...]) -> tuple[Any, ...]:
    ranks, *more = PLANS[name]
    made = plain(*WORDS, *more, *words)
    if ranks == 1:
        return trained(folder, (), made=made)
    found = on_ranks(ranks, folder, lambda r: trained(folder / "run", (), r, made))
    assert all(one[0] == found[0][0] for one in found)
    return found[0]


def by_hand(criterion: nn.Module, steps: int = 3, empty: tuple[int, ...] = ()) -> tuple[list[float], list[float]]:
    """(weights, losses): the whole window in one forward."""
    torch.manual_seed(0)
    net, lines, losses = network(0, 0), Lines(empty), []
    for step in range(steps):
        window = range(9 * step % 27, min(9 * step % 27 + 9, 22))
        value = criterion(net(lines.inputs[list(window)]), lines.labels[list(window)])
        losses.append(value.item())
        net.zero_grad()
        value.backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).tolist(), losses


TORCHS = {"padded": ((), nn.CrossEntropyLoss()),
          "weights": ((f"loss.class_weights={WEIGHTS}", "loss.label_smoothing=0.1"),
                      nn.CrossEntropyLoss(torch.tensor(WEIGHTS, dtype=torch.float64), label_smoothing=0.1))}  # fmt: skip


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that by_hand begins with."""

    def build(num_classes: int, in_chans: int) -> nn.Module:
        torch.manual_seed(0)
        return network(0, 0)

    monkeypatch.setitem(model.TABLE, "test_tokens", type("T", (model.TABLE["test_tokens"],), {"factory": staticmethod(build)}))


@pytest.mark.parametrize("plan", ["single", "together", "ddp4",
                                  *(pytest.param(p, marks=pytest.mark.slow) for p in ("dp", "ddp2", "ddp3"))])  # fmt: skip
@pytest.mark.parametrize("which", [pytest.param("padded", marks=pytest.mark.slow), "weights"])
def test_fast_is_the_window_in_one_forward(tmp_path: Path, start: None, plan: str, which: str) -> None:
    words, criterion = TORCHS[which]
    weights, losses = by_hand(criterion)
    found, rows, _ = on_plan(plan, tmp_path, words)
    assert found == pytest.approx(weights, rel=1e-12, abs=1e-13)
    assert [row["train/loss"] for row in rows if "train/loss" in row] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("method", ["tree", pytest.param("bin64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("plans", [("single", "ddp4"), pytest.param(("dp", "ddp2"), marks=pytest.mark.slow)])
def test_exact_is_the_same_to_the_bit(tmp_path: Path, start: None, method: str, plans: tuple[str, ...]) -> None:
    words = "reduction=exact", f"reduction.method={method}", *TORCHS["weights"][0]
    one, other = (on_plan(plan, tmp_path / plan, words) for plan in plans)
    assert one[0] == other[0]
    assert [row.get("train/loss") for row in one[1]] == [row.get("train/loss") for row in other[1]]
    assert one[0] == pytest.approx(by_hand(TORCHS["weights"][1])[0], rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("words", [("batch.micro=2",), ("batch.micro=3", "precision=amp", "precision.dtype=float16"),
                                   ("batch.micro=2", "reduction=exact")])  # fmt: skip
def test_a_window_without_elements_makes_no_update(tmp_path: Path, words: tuple[str, ...]) -> None:
    _, rows, skipped = trained(tmp_path, (*words, f"+data.kwargs.empty={list(range(9, 18))}"))
    steps = [row for row in rows if "train/loss" in row]
    assert skipped == 1 and [row["update"] for row in steps] == [1, 1, 2]
    assert steps[1]["train/loss"] == 0.0 and all(row["train/loss"] < 1e3 for row in steps)
    scales = [row["train/loss_scale"] for row in steps]
    assert scales[0] == scales[1], "nothing overflowed, and the scale moved"


def test_no_element_left_keeps_the_scale_and_the_gradients_finite(tmp_path: Path, start: None) -> None:
    """fp16 sees the totals of hundreds of elements, divided by about as many."""
    fp16 = "precision=amp", "precision.dtype=float16", "batch.micro=3"
    found, rows, skipped = trained(tmp_path, fp16)
    assert not skipped and rows[0]["train/loss_scale"] == 65536
    assert found == pytest.approx(by_hand(nn.CrossEntropyLoss())[0], abs=2e-3)


def test_evaluation_counts_elements(tmp_path: Path, start: None) -> None:
    weights, rows, _ = trained(tmp_path, ("batch.micro=2", "batch.eval=5"))
    net, lines = network(0, 0), Lines()
    nn.utils.vector_to_parameters(torch.tensor(weights, dtype=torch.float64), net.parameters())
    expected = functional.cross_entropy(net(lines.inputs), lines.labels).item()
    assert [row["eval/loss"] for row in rows if "eval/loss" in row] == pytest.approx([expected], rel=1e-12)


def named_loss() -> Any:
    def criterion(output: Tensor, labels: Tensor) -> Any:
        valid = labels != -100
        entropy = functional.cross_entropy(output, labels, reduction="sum")
        right = (output.argmax(1) == labels).sum()
        return {"loss": isobatch.Sum(entropy, valid.sum()), "accuracy": isobatch.Sum(right, valid.sum()),
                "ones": torch.ones(())}  # fmt: skip

    return criterion


@pytest.mark.parametrize("plan", ["single", pytest.param("ddp4", marks=pytest.mark.slow)])
def test_named_numbers_are_logged_by_their_own_weights(tmp_path: Path, start: None, monkeypatch: pytest.MonkeyPatch,
                                                       plan: str) -> None:  # fmt: skip
    register(loss, "test_named", named_loss, monkeypatch)
    _, rows, _ = on_plan(plan, tmp_path, ("loss=custom", "loss.name=test_named", "steps=1", "eval_every=1"))
    net, lines = network(0, 0), Lines()
    torch.manual_seed(0)
    net = network(0, 0)
    output, labels = net(lines.inputs[:9]), lines.labels[:9]
    assert rows[0]["train/accuracy"] == pytest.approx(((output.argmax(1) == labels).sum() / (labels != -100).sum()).item())
    assert rows[0]["train/ones"] == pytest.approx(1.0)
    assert rows[0]["train/loss"] == pytest.approx(functional.cross_entropy(output, labels).item(), rel=1e-12)


def test_a_loss_that_changes_its_kind_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changing() -> Any:
        return lambda output, labels: Sum(output.sum(), 4) if len(labels) == 2 else output.mean()

    register(loss, "test_changing", changing, monkeypatch)
    with pytest.raises(JobFailed, match=r"at first it gave an isobatch\.Sum, and now a mean"):
        trained(tmp_path, ("loss=custom", "loss.name=test_changing", "batch.micro=3"))


@pytest.mark.parametrize("given", ["{'a': output.mean()}", "isobatch.Sum(output.sum(), output)", "isobatch.Sum(output, 1)",
                                   "{'loss': output.mean(), 'a': output}", "isobatch.Sum(output.sum(), -1)"])  # fmt: skip
def test_what_is_no_loss_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    register(loss, "test_wrong", lambda: lambda output, labels: eval(given), monkeypatch)
    with pytest.raises(ConfigError, match=r"loss\.name"):
        trained(tmp_path, ("loss=custom", "loss.name=test_wrong", "batch.micro=3"))


SHAPES = [((4, CLASSES), (4,)), ((4, CLASSES, 3), (4, 3)), ((4, CLASSES, 3, 2), (4, 3, 2))]


@pytest.mark.parametrize(("output", "labels"), SHAPES)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("ignored", [None, 2])
def test_the_mean_of_a_sum_is_torchs(output: Any, labels: Any, weights: Any, ignored: int | None) -> None:
    scores, classes = torch.randn(output, dtype=torch.float64), torch.randint(0, CLASSES, labels)
    if ignored is None and len(labels) > 1:
        classes[0, 0] = -100
    tensor = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    for smoothing in (0.0, 0.2):
        expected = functional.cross_entropy(scores, classes, tensor, ignore_index=-100 if ignored is None else ignored,
                                            label_smoothing=smoothing)  # fmt: skip
        found = ElementCrossEntropy(weights, ignored, smoothing)(scores, classes)
        assert mean_of(found).item() == pytest.approx(expected.item(), rel=1e-12)
        assert isinstance(found, Sum) == (len(labels) > 1 or weights is not None or ignored is not None)
    focal = FocalLoss(weights, ignored, 0.0)(scores, classes)
    plain_loss = ElementCrossEntropy(weights, ignored)(scores, classes)
    assert mean_of(focal).item() == pytest.approx(mean_of(plain_loss).item(), rel=1e-12)
    probabilities = torch.rand(output, dtype=torch.float64).softmax(1)
    expected = functional.cross_entropy(scores, probabilities, tensor)
    found = mean_of(ElementCrossEntropy(weights, None)(scores, probabilities))
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_torchs_own_cross_entropy_is_weighed_by_elements() -> None:
    found = by_elements(nn.CrossEntropyLoss(torch.tensor(WEIGHTS), ignore_index=3, label_smoothing=0.1))
    assert isinstance(found, ElementCrossEntropy) and (found.ignore_index, found.label_smoothing) == (3, 0.1)
    assert by_elements(nn.MSELoss()) is not None and not isinstance(by_elements(nn.MSELoss()), ElementCrossEntropy)


def test_a_label_that_one_sample_has_and_no_loss_leaves_out_is_an_error() -> None:
    with pytest.raises(IndexError):
        ElementCrossEntropy(None, None)(torch.randn(2, 3), torch.tensor([0, -100]))


def test_the_focal_loss_is_lins() -> None:
    scores, classes = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 3, 0])
    p = scores.softmax(1).gather(1, classes[:, None])[:, 0]
    expected = (-((1 - p) ** 1.5) * p.log()).mean()
    assert FocalLoss(None, None, 1.5)(scores, classes).item() == pytest.approx(expected.item(), rel=1e-12)
    certain = torch.tensor([[200.0, 0.0]], requires_grad=True)
    FocalLoss(None, None, 0.5)(certain, torch.tensor([0])).backward()
    assert certain.grad is not None and bool(torch.isfinite(certain.grad).all())


@pytest.mark.parametrize("words", ["loss.class_weights=[1,-1]", "loss.class_weights=[0,0]", "loss.label_smoothing=2"])
def test_refused_weights(words: str) -> None:
    with pytest.raises(ConfigError, match="loss"):
        config.load(plain(words))


def test_labels_that_no_loss_leaves_out_are_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(Dataset[tuple[Tensor, int]]):
        targets = [0, -100, 1, 1]

        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return torch.randn(3, 1, 1), self.targets[i]

    register(data, "test_half", lambda split: Half(), monkeypatch)
    monkeypatch.setitem(model.TABLE, "test_tokens", type("T", (model.TABLE["test_tokens"],), {
        "factory": staticmethod(lambda n, c: nn.Sequential(nn.Flatten(), nn.Linear(3, 2)))}))  # fmt: skip
    words = "data.name=test_half", "data.num_classes=2", "batch.micro=2", "batch.effective=4"
    with pytest.raises(ConfigError, match=r"loss\.ignore_index=null.* has the label -100"):
        trained(tmp_path / "a", words)
    _, rows, _ = trained(tmp_path / "b", (*words, "loss.ignore_index=-100", "batch.effective=2"))
    assert all(row["train/loss"] < 10 for row in rows if "train/loss" in row)
