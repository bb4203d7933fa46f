"""Group metrics: equal to scikit-learn's and torchmetrics' value on the whole set, at any number of ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import sklearn.metrics
import torch
from harness import on_ranks, plain
from torch import Tensor, nn

import isobatch
from isobatch import better, config, metrics
from isobatch.data import DataInfo, Split
from isobatch.data.device import ToDevice
from isobatch.data.feed import TensorSource
from isobatch.errors import ConfigError, JobFailed
from isobatch.evaluate.evaluator import Evaluator
from isobatch.metrics import Auto, Named, NoMetrics, boxes
from isobatch.precision.levels import Full
from isobatch.runtime.distributed import Ranks

CPU = torch.device("cpu")


def evaluated(options: Any, output: Tensor, targets: Tensor, ranks: Ranks, classes: int = 0, batch: int = 3,
              ignored: int | None = None) -> dict[str, float]:  # fmt: skip
    """The result of evaluating the identity on `output`."""
    split = Split(None, (output, targets), info=DataInfo("test", tuple(output.shape[1:])))
    split.dataset = range(len(output))
    source = TensorSource((output, targets), ToDevice(CPU, None, False))
    made = options.build(output[:1], targets[:1], classes, ignored)
    evaluator = Evaluator(split, source, lambda output, targets: output.float().mean(), Full(), ranks, CPU, batch, classes,
                          metrics=made)  # fmt: skip
    return {key.removeprefix("eval/"): value for key, value in evaluator(nn.Identity()).items()}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(5))


def own(outputs: Tensor, targets: Tensor, scale: float = 1.0) -> dict[str, float]:
    order = float((targets * torch.arange(20)).sum())
    return {"first": scale * float(outputs[0, 0]), "rows": float(len(outputs)), "order": order}


CASES = {
    "classes": (Auto(names=["MulticlassF1Score", "MulticlassAUROC", "MulticlassCalibrationError"],
                     kwargs={"MulticlassF1Score": {"average": "macro"}}), draw(20, 7), whole(7, 20), 7),
    "labels": (Auto(), draw(20, 4), (whole(2, 20, 4)).float(), 4),
    "numbers": (Auto(names=["PearsonCorrCoef"]), draw(20), draw(20, seed=2), 0),
    "masks": (Auto(), draw(20, 3, 4, 5), whole(3, 20, 4, 5).where(draw(20, 4, 5) > -1, -100), 0),
    "tokens": (Auto(), draw(20, 6, 5), whole(6, 20, 5).where(draw(20, 5) > -1, -100), 0),
    "own": (Named(names=["test_own"], kwargs={"test_own": {"scale": 2.0}}), draw(20, 7), whole(7, 20), 7),
}  # fmt: skip


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "OWN", dict(metrics.OWN))
    isobatch.register("metric", "test_own", own)
    monkeypatch.setattr("isobatch.metrics.named.OWN", metrics.OWN)


def results(ranks: Ranks) -> dict[str, dict[str, float]]:
    return {name: evaluated(options, output, targets, ranks, classes)
            for name, (options, output, targets, classes) in CASES.items()}  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, float]]:
    isobatch.register("metric", "test_own", own)
    return results(Ranks())


@pytest.mark.parametrize("count", [3, pytest.param(9, marks=pytest.mark.slow)])
def test_any_number_of_ranks_gives_the_same_to_the_bit(tmp_path: Path, alone: dict[str, Any], count: int) -> None:
    """Nine ranks: two of them have no batch at all."""
    assert on_ranks(count, tmp_path, results) == [alone] * count


def test_classes_are_sklearns(alone: dict[str, Any]) -> None:
    _, output, targets, _ = CASES["classes"]
    found, said = alone["classes"], output.argmax(1)
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(targets, said))
    assert found["accuracy_top5"] == pytest.approx(sklearn.metrics.top_k_accuracy_score(targets, output, k=5))
    assert found["MulticlassF1Score"] == pytest.approx(sklearn.metrics.f1_score(targets, said, average="macro"))
    expected = sklearn.metrics.roc_auc_score(targets, output.softmax(1), multi_class="ovr")
    assert found["MulticlassAUROC"] == pytest.approx(expected, rel=1e-5)
    import torchmetrics  # a second, which no other file's tests need

    whole_set = torchmetrics.classification.MulticlassCalibrationError(7)(output.softmax(1), targets)
    assert found["MulticlassCalibrationError"] == pytest.approx(whole_set.item(), rel=1e-6)


def test_labels_are_sklearns(alone: dict[str, Any]) -> None:
    _, output, targets, _ = CASES["labels"]
    found = alone["labels"]
    assert found["map"] == pytest.approx(sklearn.metrics.average_precision_score(targets, output, average="macro"), rel=1e-5)
    assert found["f1"] == pytest.approx(sklearn.metrics.f1_score(targets, output > 0, average="macro"), rel=1e-5)


def test_numbers_are_sklearns(alone: dict[str, Any]) -> None:
    _, output, targets, _ = CASES["numbers"]
    found = alone["numbers"]
    assert found["mae"] == pytest.approx(sklearn.metrics.mean_absolute_error(targets, output))
    assert found["rmse"] == pytest.approx(sklearn.metrics.root_mean_squared_error(targets, output))
    assert found["r2"] == pytest.approx(sklearn.metrics.r2_score(targets, output))
    assert found["PearsonCorrCoef"] == pytest.approx(torch.corrcoef(torch.stack([output, targets]))[0, 1].item(), rel=1e-4)
    many = evaluated(Auto(), draw(20, 3), draw(20, 3, seed=2), Ranks())
    assert many["r2"] == pytest.approx(sklearn.metrics.r2_score(draw(20, 3, seed=2), draw(20, 3)))


def test_masks_and_tokens_leave_out_what_the_loss_does(alone: dict[str, Any]) -> None:
    _, output, targets, _ = CASES["masks"]
    valid = targets != -100
    said, there = output.argmax(1)[valid], targets[valid]
    assert alone["masks"]["mean_iou"] == pytest.approx(sklearn.metrics.jaccard_score(there, said, average="macro"))
    assert alone["masks"]["pixel_accuracy"] == pytest.approx((said == there).double().mean().item())
    _, output, targets, _ = CASES["tokens"]
    expected = nn.functional.cross_entropy(output, targets).exp().item()
    assert alone["tokens"]["perplexity"] == pytest.approx(expected, rel=1e-6)
    assert alone["tokens"]["accuracy"] == pytest.approx((output.argmax(1) == targets)[targets != -100].double().mean().item())
    other = evaluated(Auto(), output, targets.where(targets != -100, 3), Ranks(), ignored=3)
    counted = (targets != -100) & (targets != 3)
    assert other["accuracy"] == pytest.approx((output.argmax(1) == targets)[counted].double().mean().item())


def test_own_ones_see_the_rows_in_order(alone: dict[str, Any]) -> None:
    _, output, targets, _ = CASES["own"]
    assert {k: v for k, v in alone["own"].items() if k not in ("loss", "samples")} == own(output, targets, 2.0)


def test_none_says_the_loss_alone() -> None:
    assert set(evaluated(NoMetrics(), draw(6, 7), whole(7, 6), Ranks(), 7)) == {"loss", "samples"}


def test_what_cannot_be_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.names=Nothing: is no class of torchmetrics"):
        Named(names=["Nothing"]).build(draw(1, 3), whole(3, 1), 3, None)
    with pytest.raises(ConfigError, match=r"metrics\.kwargs\.MulticlassF1Score"):
        Named(names=["MulticlassF1Score"], kwargs={"MulticlassF1Score": {"x": 1}}).build(draw(1, 3), whole(3, 1), 3, None)
    with pytest.raises(ConfigError, match=r"metrics\.names"):
        Named()
    with pytest.raises(ConfigError, match=r"metrics\.kwargs\.x"):
        Auto(kwargs={"x": {}})
    with pytest.raises(JobFailed, match="cannot take such outputs"):
        evaluated(Named(names=["PearsonCorrCoef"]), draw(6, 3), whole(3, 6), Ranks(), 3)


def test_what_best_and_the_search_follow_is_there() -> None:
    there = better.there([("mean_iou", "pixel_accuracy")], False)
    options = config.load(plain("checkpoint.best=eval/mean_iou")).checkpoint
    options.check(there)
    assert options.direction("eval/mean_iou") == "max"
    with pytest.raises(ConfigError, match=r"checkpoint\.best=eval/f1"):
        config.load(plain("checkpoint.best=eval/f1")).checkpoint.check(there)
    config.load(plain("checkpoint.best=eval/f1")).checkpoint.check(better.there([()], False))  # not known yet
    assert better.objective({"eval/loss": 1.0, "eval/r2": 0.5}, "eval/r2") == 0.5
    assert better.objective({"eval/loss": 1.0}, None) == 1.0
    with pytest.raises(ConfigError, match=r"sweep\.objective=eval/r2"):
        better.objective({"eval/loss": 1.0}, "eval/r2")
    with pytest.raises(ConfigError, match=r"sweep\.mode"):
        config.load(plain("sweep.objective=eval/Mine"))
    assert math.isinf(metrics_of_nothing()["perplexity"])


def metrics_of_nothing() -> dict[str, float]:
    return evaluated(Auto(), draw(3, 6, 5), torch.full((3, 5), -100), Ranks())


BOXES = {"boxes": torch.tensor([[[0.0, 0, 9, 9], [5, 5, 9, 9]], [[1, 1, 6, 6], [0, 0, 0, 0]]]),
         "labels": torch.tensor([[0, 1], [1, -1]])}  # fmt: skip


def test_boxes_are_told_apart_from_room_that_is_not_used() -> None:
    made = Named(names=["IntersectionOverUnion"]).build(None, None, 2, None)[0]
    made.begin()
    for number in (1, 0):  # out of order, as ranks have them
        rows = {key: value[number : number + 1] for key, value in BOXES.items()}
        made.fill(torch.zeros(0), number, {**rows, "scores": torch.tensor([[0.9, 0.8]]), "losses": torch.zeros(())}, rows)
    batches = made.all(Ranks())
    assert [set(output) for output, _ in batches] == [{"boxes", "scores", "labels"}] * 2
    assert [len(boxes.of_pictures(targets)[0]["labels"]) for _, targets in batches] == [2, 1]
    for number in (0, 1):
        rows = {key: value[number : number + 1] for key, value in BOXES.items()}
        made.fill(torch.zeros(0), number, {**rows, "scores": torch.ones(1, 2)}, rows)
    assert made.values([], Ranks())["iou"] == 1
    with pytest.raises(JobFailed, match="asks outputs and targets for boxes, scores, labels with a row for each picture"):
        made.fill(torch.zeros(0), 0, torch.zeros(2, 4), BOXES)


def test_mean_average_precision_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^metrics\.names=MeanAveragePrecision: needs the package .*isobatch\[detection\]"):
        Auto(names=["MeanAveragePrecision"])


def test_mean_average_precision() -> None:
    pytest.importorskip("faster_coco_eval")
    made = Named(names=["MeanAveragePrecision"]).build(None, None, 2, None)[0]
    made.begin()
    made.fill(torch.zeros(0), 0, {**BOXES, "scores": torch.tensor([[0.9, 0.8], [0.7, 0.0]])}, BOXES)
    found = made.values([], Ranks())
    assert found["map"] == pytest.approx(1) and "map_large" not in found and "classes" not in found
