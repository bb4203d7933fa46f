"""What is done with the window's gradient: clipping of four kinds, groups with rates and beginnings of their own, SAM."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Record, plain, rows, summary, train, train_ranks
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from isobatch.config import load, options
from isobatch.errors import ConfigError
from isobatch.optimizer import TimmOptimizer
from isobatch.runtime.timm_import import timm

WORDS = ("logger=none", "threads=1", "data=digits", "model=mlp", "model.width=8", "model.depth=1", "epochs=null", "steps=4",
         "batch.effective=24", "batch.micro=8", "batch.shard=null", "reduction=exact", "log_every=1", "eval_every=4",
         "scheduler=constant", "optimizer=sgd", "optimizer.lr=0.5", "optimizer.weight_decay=0.1")  # fmt: skip
KINDS = {
    "norm": ("clip=norm", "clip.max_norm=0.05"),
    "value": ("clip=value", "clip.max_value=0.002"),
    "agc": ("clip=agc", "clip.factor=0.003"),
    "sam": ("optimizer.sam=0.5",),
    "adaptive sam": ("optimizer.sam=0.5", "optimizer.sam_adaptive=true"),
    "held": ("optimizer.groups=[{match: '1', frozen_until: 2}, {match: '*.bias', lr_scale: 3}]",),
}
KINDS["all"] = (*KINDS["agc"], *KINDS["adaptive sam"], *KINDS["held"])


class State:
    """As much of a training state as is clipped."""

    def __init__(self, model: nn.Module):
        self.parameters, self.update = list(model.parameters()), 0

    def clip_gradients(self, max_norm: float | None) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.parameters, max_norm or float("inf"))


def model_with_gradients() -> Any:
    torch.manual_seed(0)
    model = timm.create_model("test_convnext", num_classes=3)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


@pytest.mark.parametrize(("node", "reference"), [
    ({"name": "none"}, lambda m: None),
    ({"name": "norm", "max_norm": 2.0}, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 2.0)),
    ({"name": "value", "max_value": 0.3}, lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.3)),
    ({"name": "agc"}, lambda m: timm.utils.adaptive_clip_grad(
        [p for p in m.parameters() if not any(p is q for q in m.get_classifier().parameters())], 0.01)),
    ({"name": "agc", "head": True, "factor": 0.1}, lambda m: timm.utils.adaptive_clip_grad(m.parameters(), 0.1)),
])  # fmt: skip
def test_each_kind_is_the_librarys_and_tells_the_true_norm(node: dict[str, Any], reference: Any) -> None:
    ours, theirs = model_with_gradients(), model_with_gradients()
    before = nn.utils.get_total_norm([p.grad for p in theirs.parameters()])
    clipping = options("clip", node).build(ours, None)
    assert clipping(State(ours)) == before and clipping.active == (node["name"] != "none")
    reference(theirs)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("kind", [kind if kind == "all" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_it_has_an_effect_and_one_process_and_two_train_the_same(kind: str, tmp_path: Path) -> None:
    one = train(tmp_path / "one", *WORDS, *KINDS[kind])
    assert train(tmp_path / "none", *WORDS).weights[-1] != one.weights[-1]
    two = train_ranks(2, tmp_path / "two", *WORDS, *KINDS[kind])
    assert two[0].weights == two[1].weights == one.weights
    assert rows(tmp_path / "two", "train/loss") == rows(tmp_path / "one", "train/loss")
    if kind == "norm":
        assert train(tmp_path / "older", *WORDS, "max_grad_norm=0.05").weights == one.weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", [("parallel=fsdp",), ("precision=O2",), ("plan=dp2",),
                                   ("precision=amp", "precision.dtype=float16")])  # fmt: skip
def test_with_weights_in_parts_and_half_weights_too(kind: str, words: tuple[str, ...], tmp_path: Path) -> None:
    if words[0] == "parallel=fsdp" and "clip=agc" in KINDS[kind]:
        with pytest.raises(AssertionError, match=r"clip\.name=agc: works on whole weights"):
            train_ranks(2, tmp_path, *WORDS, "reduction=fast", *KINDS[kind], strategy="fsdp")
        return
    rest = [word for word in WORDS if not word.startswith("reduction")]
    reference = train(tmp_path / "one", *rest, *KINDS[kind], *(w for w in words if w.startswith("precision")))
    if words[0].startswith("parallel"):
        found: Record = train_ranks(2, tmp_path / "two", *rest, *KINDS[kind], strategy="fsdp")[0]
    elif words[0].startswith("plan"):
        found = train(tmp_path / "two", *rest, *KINDS[kind], *words)
    else:
        found = train_ranks(2, tmp_path / "two", *rest, *KINDS[kind], *words)[0]
    tolerance = 1e-5 if not words[0].startswith("precision") else 2e-2
    if words[0] != "parallel=fsdp":  # its record is of other shapes
        assert found.weights[-1] == pytest.approx(reference.weights[-1], rel=tolerance, abs=tolerance)
    assert rows(tmp_path / "two", "train/loss") == pytest.approx(rows(tmp_path / "one", "train/loss"), rel=tolerance)


def test_two_words_for_one_thing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_grad_norm=1\.0: is the older key of clip=norm, and clip=agc is set"):
        load(plain("clip=agc", "max_grad_norm=1"))
    with pytest.raises(ConfigError, match=r"optimizer\.layer_decay=0\.7: makes groups of its own"):
        load(plain("optimizer.layer_decay=0.7", "optimizer.bias_decay=0"))


def groups_of(**node: Any) -> dict[str, dict[str, Any]]:
    """Parameter's name -> its group's options."""
    model = timm.create_model("test_vit", num_classes=3)
    optimizer = TimmOptimizer(**{"opt": "sgd", "lr": 0.5, "weight_decay": 0.1, **node}).build(model, 10)
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}


def test_groups_by_name_and_decays_by_kind() -> None:
    assert {name: g["weight_decay"] for name, g in groups_of().items() if g["weight_decay"]}.keys() == {
        name for name, p in timm.create_model("test_vit", num_classes=3).named_parameters()
        if p.ndim > 1 and name not in ("pos_embed", "cls_token", "reg_token")}  # fmt: skip
    found = groups_of(groups=[{"match": "head", "lr_scale": 10}, {"match": ["blocks.0", "*.bias"], "lr": 0.25},
                              {"match": "head.bias", "weight_decay": 0.3}], reference_batch=5)  # fmt: skip
    rates = {name: g["initial_lr"] for name, g in found.items()}
    assert rates["head.weight"] == 10.0 and rates["blocks.1.mlp.fc1.weight"] == 1.0  # doubled by reference_batch
    assert rates["blocks.0.mlp.fc1.weight"] == rates["head.bias"] == 0.5 and found["head.bias"]["weight_decay"] == 0.3
    kinds = groups_of(norm_decay=0.01, bias_decay=0.02, embedding_decay=0.03)
    wanted = {"norm.weight": 0.01, "norm.bias": 0.01, "head.bias": 0.02, "pos_embed": 0.03, "head.weight": 0.1}
    assert {name: kinds[name]["weight_decay"] for name in wanted} == wanted


@pytest.mark.parametrize(("entry", "problem"), [
    ({"lr": 1}, r"groups\[0\]=.*says not which"), ({"match": "x", "rate": 1}, r"groups\[0\]\.rate=1: is no option"),
    ({"match": "nowhere"}, r"groups\[0\]\.match=nowhere: matches no trained parameter; take some of blocks"),
    ({"match": "head", "lr": "big"}, r"groups\[0\]\.lr=big: is no number"), ("head", "says not which"),
    ({"match": "head", "lr": 1, "lr_scale": 2}, "say the same"),
    ({"match": "head", "frozen_until": "soon"}, r"frozen_until=soon: is no length of a run"),
])  # fmt: skip
def test_a_group_that_is_none_is_one_line(entry: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        groups_of(groups=[entry])


def test_what_is_held_back_does_not_move_until_its_update(tmp_path: Path) -> None:
    """Nor does its momentum or decay; and a resume in between goes on alike."""
    words = (*WORDS, "optimizer.groups=[{match: '*', frozen_until: 50%}, {match: '*.bias', frozen_until: 0}]")
    seen: list[dict[str, torch.Tensor]] = []

    def observe(state: Any, parts: Any, data: Any) -> None:
        seen.append({name: p.detach().clone() for name, p in state.model.named_parameters()})

    record = train(tmp_path / "whole", *words, observe=observe)
    for name in seen[0]:
        moves = [not torch.equal(a[name], b[name]) for a, b in itertools.pairwise(seen)]
        assert moves == ([True] * 3 if name.endswith("bias") else [False, True, True]), name
    train(tmp_path / "first", *words[:-1], words[-1].replace("50%", "2"), "steps=1")
    again = train(tmp_path / "second", f"resume={tmp_path / 'first'}", "steps=4")
    assert again.weights[-1] == record.weights[-1]


def test_sam_is_what_its_authors_do_with_one_gradient_of_the_whole_batch(tmp_path: Path) -> None:
    """Against a hand-written step: climb by rho along the gradient, and descend from the start by the one there."""
    rho, first = 0.5, {}

    def observe(state: Any, parts: Any, data: Any) -> None:
        if not first:
            first.update(model=state.model, parts=parts, inputs=torch.cat([m.inputs for m in data.micro_batches]),
                         targets=torch.cat([m.targets for m in data.micro_batches]))  # fmt: skip
            first["after"] = [p.detach().clone() for p in state.model.parameters()]

    words = [*WORDS, "optimizer.sam=0.5", "optimizer.momentum=0", "optimizer.weight_decay=0", "steps=1"]
    train(tmp_path / "sam", *words, observe=observe)
    start: list[list[torch.Tensor]] = []

    def remember(state: Any, parts: Any, data: Any) -> None:
        start.append([p.detach().clone() for p in state.model.parameters()])

    train(tmp_path / "still", *words, "optimizer.lr=0", observe=remember)
    model = first["model"]

    def gradient(weights: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            for p, w in zip(model.parameters(), weights, strict=True):
                p.copy_(w)
        loss = nn.functional.cross_entropy(model(first["inputs"]), first["targets"])
        return list(torch.autograd.grad(loss, list(model.parameters())))

    climb = gradient(start[0])
    length = torch.stack([g.norm() for g in climb]).norm()
    there = gradient([w + rho * g / length for w, g in zip(start[0], climb, strict=True)])
    for w, g, after in zip(start[0], there, first["after"], strict=True):
        assert torch.allclose(w - 0.5 * g, after, atol=1e-6)
    # the loss that is logged is that of the weights, not of where the climb has led
    assert rows(tmp_path / "sam", "train/loss") == rows(tmp_path / "still", "train/loss")


@pytest.mark.slow
def test_sam_with_batch_norm_and_half_gradients_is_finite_and_alike(tmp_path: Path) -> None:
    words = ("logger=none", "threads=1", "reduction=exact", "data=synthetic", "data.samples=24", "data.eval_samples=8",
             "data.image_size=32", "data.num_classes=4", "model=timm", "model.arch=test_resnet", "epochs=null", "steps=2",
             "log_every=1", "eval_every=2", "batch.effective=8", "batch.micro=4", "batch.shard=null", "optimizer.lr=0.01",
             "optimizer.sam=0.05", "checkpoint=none")  # fmt: skip
    statistics: list[list[float]] = []

    def observe(state: Any, parts: Any, data: Any) -> None:
        layer = next(m for m in state.model.modules() if isinstance(m, _BatchNorm))
        statistics.append([*layer.running_mean.tolist(), float(layer.num_batches_tracked)])

    train(tmp_path / "one", *words, observe=observe)
    assert statistics[-1][-1] == 2.0, "one tracked batch a step, though it was run twice"
    train_ranks(2, tmp_path / "two", *words)
    assert summary(tmp_path / "two")["weights_sha256"] == summary(tmp_path / "one")["weights_sha256"]
