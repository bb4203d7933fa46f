"""Group `optimizer`: any optimizer of timm by name, without weight decay on norms and biases, fused where torch can."""

from __future__ import annotations

import difflib
import logging
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from isobatch.checks import choice, positive, within
from isobatch.errors import ConfigError
from isobatch.marks import Marks, option
from isobatch.optimizer.groups import Decays, Rule, param_groups, rules
from isobatch.runtime.dtensor import in_parts

if TYPE_CHECKING:
    import torch
    from torch import nn


log = logging.getLogger(__name__)

OF_TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"nesterov": True, "momentum": 0.9}), "momentum": ("SGD", {"nesterov": False, "momentum": 0.9}),
    "adam": ("Adam", {}), "adamw": ("AdamW", {}),
}  # fmt: skip
RULES = {"linear": 1.0, "sqrt": 0.5}  # of reference_batch: the exponent
HALF_EPS = 1e-4  # fp16's smallest number is 6e-8, and the square of a gradient below 2e-4 is 0: eps is all that is left


class OptimizerOptions(Protocol):
    @property
    def name(self) -> str: ...

    def build(self, model: nn.Module, effective_batch: int) -> torch.optim.Optimizer:
        """An optimizer whose groups carry `initial_lr`: what the schedule's factor multiplies."""


@dataclass(frozen=True)
class TimmOptimizer:
    """What timm.optim.create_optimizer_v2 makes; torch's own four are made here, alike.

    Args:
        opt: timm's name (sgd is with Nesterov momentum, `momentum` without; adamw, lamb, ...).
        lr: for the effective batch as stated; never scaled with the world size.
        reference_batch: scales lr by effective batch / reference_batch (linear rule, Goyal et al. 2017) on request, or by
            its square root (reference_rule `sqrt`, Krizhevsky 2014; usual for Adam and its like).
        decay_norms_and_biases: weight decay on one-dimensional parameters too.
        layer_decay: lr multiplier per layer from the head down (null: none).
        fused: null = where torch has it for this optimizer and device.
        kwargs: handed to the optimizer (betas, eps, ...).
        groups: what parameters have of their own, by patterns of names; a later entry wins: `match` (a pattern or several),
            `lr` or `lr_scale`, `weight_decay`, `frozen_until` (a length of the run: not changed before).
        norm_decay, bias_decay, embedding_decay: weight decay of these kinds; null: as the general rule has it.
        sam: rho of sharpness-aware minimisation: every window is run twice (null: once). sam_adaptive: by each weight's size.
    """

    name: str = "timm"
    opt: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.9
    decay_norms_and_biases: bool = False
    layer_decay: float | None = None
    reference_batch: int | None = None
    reference_rule: str = "linear"
    fused: bool | None = option(None, resume="identity")
    kwargs: dict[str, Any] = field(default_factory=dict)
    groups: list[Any] = field(default_factory=list)
    norm_decay: float | None = None
    bias_decay: float | None = None
    embedding_decay: float | None = None
    sam: float | None = None
    sam_adaptive: bool = False

    def __post_init__(self) -> None:
        for key in ("norm_decay", "bias_decay", "embedding_decay"):
            if getattr(self, key) is not None:
                within(f"optimizer.{key}", getattr(self, key), 0, 1e6)
        if self.sam is not None:
            within("optimizer.sam", self.sam, 1e-12, 1e3)
        if self.layer_decay is not None and (self.rules or self.decays != Decays()):
            key = "groups" if self.rules else "norm_decay"
            raise ConfigError("optimizer.layer_decay", self.layer_decay, f"makes groups of its own, beside optimizer.{key}",
                              f"leave layer_decay or optimizer.{key} out")  # fmt: skip
        if self.layer_decay is not None:
            positive("optimizer.layer_decay", self.layer_decay)  # below 0 every other layer would climb
        within("optimizer.lr", self.lr, 0, 1e6)
        within("optimizer.weight_decay", self.weight_decay, 0, 1e6)
        within("optimizer.momentum", self.momentum, 0, 1)
        if self.reference_batch is not None:
            positive("optimizer.reference_batch", self.reference_batch)
        choice("optimizer.reference_rule", self.reference_rule, tuple(RULES))
        if self.reference_batch is None and self.reference_rule != "linear":
            raise ConfigError("optimizer.reference_rule", self.reference_rule, "scales by no batch: reference_batch=null",
                              "set optimizer.reference_batch=256")  # fmt: skip

    @property
    def decays(self) -> Decays:
        return Decays(self.norm_decay, self.bias_decay, self.embedding_decay)

    @property
    def rules(self) -> list[Rule]:
        return rules(self.groups)

    def build(self, model: nn.Module, effective_batch: int) -> torch.optim.Optimizer:
        """An optimizer whose groups carry `initial_lr`: what the schedule's factor multiplies."""
        name = self.opt.lower()
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError("optimizer.opt", self.opt, "the model has no trainable parameter", "choose another model")
        ratio = effective_batch / self.reference_batch if self.reference_batch else 1.0
        lr = self.lr * ratio ** RULES[self.reference_rule]
        extra = dict(self.kwargs)
        if self._fused(model):
            extra["fused"] = True
        build = self._torch if name in OF_TORCH and self.layer_decay is None else self._timm
        try:
            optimizer = build(model, name, lr, extra)
            if build == self._timm and not is_meta(model):
                self._rehearse(name, lr, extra)
        except ConfigError:
            raise
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError("optimizer.opt", self.opt, f"timm could not build it ({error})",
                              "check optimizer.kwargs") from None  # fmt: skip
        protect_eps(optimizer)
        prepare_momentum(optimizer)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = group["lr"] * group.get("lr_scale", 1.0)
        return optimizer

    def _timm(self, model: nn.Module, name: str, lr: float, extra: dict[str, Any]) -> torch.optim.Optimizer:
        from isobatch.runtime.timm_import import timm

        optim = timm.optim
        if name.split("_")[-1] not in optim.list_optimizers():
            near = difflib.get_close_matches(name, optim.list_optimizers(), n=3, cutoff=0.4) or ["adamw"]
            raise ConfigError("optimizer.opt", self.opt, "timm has no such optimizer", f"try {', '.join(map(str, near))}")
        if self.layer_decay is None:  # our groups: timm's heed filter_bias_and_bn with layer_decay only
            return optim.create_optimizer_v2(self._groups(model, lr), name, lr=lr, momentum=self.momentum, **extra)  # type: ignore[arg-type]
        return optim.create_optimizer_v2(
            model, name, lr=lr, weight_decay=self.weight_decay, momentum=self.momentum,
            filter_bias_and_bn=not self.decay_norms_and_biases, layer_decay=self.layer_decay, **extra,
        )  # fmt: skip

    def _rehearse(self, name: str, lr: float, extra: dict[str, Any]) -> None:
        """Make one step on a few numbers: what an optimizer wants that a training here does not give ends in one line now.

        Raises:
            ConfigError: it cannot make a step.
        """
        import torch
        from torch import nn

        from isobatch.runtime.randomness import isolated_generators

        layer = nn.Linear(3, 2)
        with isolated_generators(), warnings.catch_warnings(action="ignore"), torch.compiler.set_stance("force_eager"):
            try:
                optimizer = replace(self, layer_decay=None, groups=[])._timm(layer, name, lr, extra)
                for p in layer.parameters():
                    p.grad = torch.full_like(p, 0.5)
                optimizer.step()
            except Exception as error:  # of every kind: somebody else's code
                raise ConfigError("optimizer.opt", self.opt, f"cannot make a step here ({type(error).__name__}: {error})",
                                  "choose another, or check optimizer.kwargs") from None  # fmt: skip

    def _torch(self, model: nn.Module, name: str, lr: float, extra: dict[str, Any]) -> torch.optim.Optimizer:
        """The same optimizer as `_timm`'s, without the seconds that importing timm takes: a start of every rank."""
        import torch

        attribute, defaults = OF_TORCH[name]
        if "momentum" in defaults:
            defaults = {**defaults, "momentum": self.momentum}
        made: torch.optim.Optimizer = getattr(torch.optim, attribute)(self._groups(model, lr), lr=lr, **{**defaults, **extra})
        return made

    def _groups(self, model: nn.Module, lr: float) -> list[dict[str, Any]]:
        scale = lr / self.lr if self.lr else 1.0  # optimizer.reference_batch scales the rates of the groups too
        given = [Rule(rule.match, {key: value * scale if key == "lr" else value for key, value in rule.own.items()})
                 for rule in self.rules]  # fmt: skip
        return param_groups(model, lr, self.weight_decay, self.decay_norms_and_biases, self.decays, given)

    def _fused(self, model: nn.Module) -> bool:
        """Fused where torch has it (a third of the cost of a small step); timm's own optimizers have none.

        Raises:
            ConfigError: asked for, but torch has none for weights that are spread over ranks.
        """
        fused_in_torch = {"sgd", "momentum", "adam", "adamw", "adagrad"}
        if in_parts(model):
            fused_in_torch = {"adam", "adamw"}
            if self.fused and self.opt.lower() not in fused_in_torch:
                raise ConfigError("optimizer.fused", True, f"torch has no fused {self.opt} for weights in parts",
                                  "set optimizer.fused=null")  # fmt: skip
        if self.fused is None:
            return self.opt.lower() in fused_in_torch
        return self.fused


def is_meta(model: nn.Module) -> bool:
    return any(p.device.type == "meta" for p in model.parameters())


def protect_eps(optimizer: torch.optim.Optimizer) -> None:
    """Raise `eps` of groups with fp16 weights to 1e-4: their state is fp16 too, and 1e-8 is 0 there. Says so once."""
    import torch

    raised = None
    for group in optimizer.param_groups:
        eps = group.get("eps")  # null or several numbers in some of timm's
        if isinstance(eps, float) and eps < HALF_EPS and any(p.dtype == torch.float16 for p in group["params"]):
            raised, group["eps"] = group["eps"], HALF_EPS
    if raised is not None:
        log.info("optimizer eps raised from %g to %g: the weights it updates are fp16 (precision=O3)", raised, HALF_EPS)


def prepare_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give fused SGD its momentum from the start, as zeros, which is what it begins with anyway.

    torch makes it in the first step for the parameters that have a gradient then, and stops with an error at one that gets
    its first gradient later.
    """
    import torch

    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and group["fused"] and group["momentum"] and not group["dampening"]:
            for p in group["params"]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)


TABLE: dict[str, Any] = {"timm": TimmOptimizer}
MARKS = Marks()
