"""Torch's own optimizers are made without timm, and are what timm makes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from isobatch.errors import ConfigError
from isobatch.optimizer import OF_TORCH, TimmOptimizer


def described(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> tuple[type, list[dict[str, Any]]]:
    names = {p: name for name, p in model.named_parameters()}
    ours = {"initial_lr"}
    return type(optimizer), [
        {k: [names[p] for p in v] if k == "params" else v for k, v in group.items() if k not in ours}
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("opt", OF_TORCH)
def test_what_is_made_here_is_what_timm_makes(opt: str, weight_decay: float) -> None:
    model = timm.create_model("test_vit", num_classes=3)  # pos_embed and cls_token: named in no_weight_decay()
    kwargs = {"betas": (0.8, 0.9)} if "adam" in opt else {"dampening": 0.0}
    ours = TimmOptimizer(opt=opt, lr=0.1, weight_decay=weight_decay, momentum=0.7, kwargs=kwargs).build(model, 48)
    theirs = create_optimizer_v2(model, opt, lr=0.1, weight_decay=weight_decay, momentum=0.7, fused=True, **kwargs)
    assert described(ours, model) == described(theirs, model)
    assert len(ours.param_groups) == (2 if weight_decay else 1)


@pytest.mark.parametrize("opt", ["adamw", "lamb"])
def test_decay_on_norms_and_biases_on_request(opt: str) -> None:
    model = timm.create_model("test_vit", num_classes=3)
    made = TimmOptimizer(opt=opt, weight_decay=0.1, decay_norms_and_biases=True).build(model, 48)
    (_, (free, decayed)) = described(made, model)
    assert free["weight_decay"] == 0 and set(free["params"]) == {"cls_token", "pos_embed"}
    assert "head.bias" in decayed["params"] and decayed["weight_decay"] == 0.1


def test_frozen_parameters_are_left_out_and_none_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    (group,) = TimmOptimizer(opt="sgd").build(model, 4).param_groups
    assert group["params"] == list(model[1].parameters())
    with pytest.raises(ConfigError, match="no trainable parameter"):
        TimmOptimizer(opt="sgd").build(model.requires_grad_(False), 4)
    with pytest.raises(ConfigError, match="has no such optimizer; try adamw"):
        TimmOptimizer(opt="adamww").build(model.requires_grad_(True), 4)


def test_the_rate_follows_the_batch_by_the_rule_that_is_asked_for() -> None:
    model = nn.Linear(2, 2)
    for rule, lr in (("linear", 4.0), ("sqrt", 2.0)):
        made = TimmOptimizer(opt="adamw", lr=1.0, reference_batch=12, reference_rule=rule).build(model, 48)
        assert {group["initial_lr"] for group in made.param_groups} == {lr}
    with pytest.raises(ConfigError, match=r"^optimizer\.reference_rule=sqrt: scales by no batch"):
        TimmOptimizer(reference_rule="sqrt")


def test_layer_decay_scales_the_rate_from_the_head_down() -> None:
    model = timm.create_model("test_vit", num_classes=3)
    rates = {group["lr"] for group in TimmOptimizer(opt="adamw", lr=1.0, layer_decay=0.5).build(model, 48).param_groups}
    assert max(rates) == 1.0 and 0.5 in rates and 0.25 in rates
    floor = TimmOptimizer(opt="adamw", lr=1.0, layer_decay=0.5, kwargs={"layer_decay_min_scale": 0.25}).build(model, 48)
    assert min(group["lr"] for group in floor.param_groups) == 0.25


@pytest.mark.slow  # a process of its own
def test_a_start_without_a_timm_model_does_not_wait_for_timm() -> None:
    done = subprocess.run([sys.executable, "-c", "import sys, torch; from isobatch.optimizer import TimmOptimizer;"
                           "TimmOptimizer(opt='momentum').build(torch.nn.Linear(2, 2), 4); assert 'timm' not in sys.modules"],
                          capture_output=True, text=True, timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stderr
