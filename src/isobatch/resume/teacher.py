"""A frozen network that teaches: timm's by name, or the model of an earlier run."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isobatch import checkpoint
from isobatch.checkpoint.folder import Damaged
from isobatch.config import options
from isobatch.data import DataInfo
from isobatch.errors import ConfigError
from isobatch.resume import rebuild
from isobatch.resume.signature import UNNAMED, Signature, order, other_classes, other_normalization

log = logging.getLogger("isobatch")


def build(chosen: dict[str, Any], info: DataInfo, device: torch.device, channels_last: bool = False) -> nn.Module:
    """The teacher in evaluation mode, fp32, without trainable parameters, on `device`. No generator notices.

    Args:
        chosen: arch, pretrained, checkpoint, kwargs (see loss.Distillation). channels_last: as the inputs it will get.

    Raises:
        ConfigError: no such architecture or run, or one that does not fit the data.
    """
    with torch.random.fork_rng([]):
        teacher = _from_run(chosen["checkpoint"], info) if chosen["checkpoint"] else _from_timm(chosen, info)
    layout = torch.channels_last if channels_last else torch.preserve_format
    return teacher.to(device, memory_format=layout).requires_grad_(False).eval()  # type: ignore[call-overload,no-any-return]


class AsItLearned(nn.Module):
    """A network that gets another one's batch as it knows images itself, and answers in the order of its classes.

    Args:
        knows: of the network; data: of the batch (Signature). Where the two agree, or one is not known, nothing is changed.
    """

    def __init__(self, network: nn.Module, knows: Signature, data: Signature):
        super().__init__()
        self.network, self.size, self.order = network, None, order(knows, data)
        scale = shift = None
        if other_normalization(knows, data):
            mean, std, own_mean, own_std = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1)
                                            for v in (data.mean, data.std, knows.mean, knows.std))  # fmt: skip
            scale, shift = (std / own_std).float(), ((mean - own_mean) / own_std).float()
        self.scale: Tensor | None
        self.shift: Tensor | None
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)
        if len(data.input_shape) == len(knows.input_shape) == 3 and data.input_shape[1:] != knows.input_shape[1:]:
            self.size = knows.input_shape[1:]
        if self.order == sorted(self.order or ()):
            self.order = None

    def forward(self, inputs: Tensor) -> Tensor:
        """(N, C, H, W) -> logits (N, classes)."""
        if self.scale is not None and self.shift is not None:
            inputs = inputs * self.scale + self.shift
        if self.size is not None and inputs.shape[-2:] != self.size:
            inputs = functional.interpolate(inputs, self.size, mode="bilinear", antialias=True)
        answer: Tensor = self.network(inputs)
        return answer if self.order is None else answer[:, self.order]


def _fitted(network: nn.Module, knows: Signature, info: DataInfo) -> nn.Module:
    wrapped = AsItLearned(network, knows, Signature.of(info))
    if wrapped.scale is None and wrapped.size is None and wrapped.order is None:
        return network
    log.info("loss.teacher: its images are %sx%s with mean %s and std %s, so the batch is changed for it",
             *(wrapped.size or info.shape[1:]), list(knows.mean), list(knows.std))  # fmt: skip
    return wrapped


def _from_timm(chosen: dict[str, Any], info: DataInfo) -> nn.Module:
    node = {"name": "timm", "arch": chosen["arch"], "pretrained": chosen["pretrained"], "kwargs": chosen["kwargs"]}
    try:
        network: nn.Module = options("model", node).build(info)
    except ConfigError as error:
        raise ConfigError(error.key.replace("model.", "loss.teacher."), error.value, error.problem,
                          error.way_out.replace("model.", "loss.teacher.")) from None  # fmt: skip
    if not chosen["pretrained"]:
        return network
    knows, fixed = Signature.of_pretrained(network), bool(getattr(network, "pretrained_cfg", {}).get("fixed_input_size"))
    if knows.num_classes != info.num_classes:
        raise ConfigError("loss.teacher.pretrained", True, f"the pretrained {chosen['arch']} knows {knows.num_classes} classes "
                          f"and this data has {info.num_classes}: its classifier would be drawn at random",
                          "train it on this data first, and name that run as loss.teacher.checkpoint")  # fmt: skip
    if len(knows.mean) != info.in_chans:
        knows = replace(knows, mean=(), std=())  # grey images: timm has added up the first layer's weights
    # a network of any size takes the student's, which is what a smaller student pays for
    return _fitted(network, replace(knows, input_shape=knows.input_shape if fixed else ()), info)


def _from_run(run: str, info: DataInfo) -> nn.Module:
    state = checkpoint.load(Path(run))
    knows = Signature.read(state["plan"])
    if knows is None:
        log.warning("loss.teacher: %s", UNNAMED.format(run))
    elif (problem := other_classes(knows, Signature.of(info))) and order(knows, Signature.of(info)) is None:
        raise ConfigError("loss.teacher.checkpoint", run, problem, "train the teacher on the classes of this data")
    shape = knows.input_shape if knows else ()
    believed = len(shape) == len(info.shape) and shape[:1] == info.shape[:1] and rebuild.sound(shape)
    takes, weights = replace(info, shape=shape) if believed else info, state.get("ema") or state["model"]
    try:
        teacher = rebuild.network(state["config"]["model"], takes, weights)
    except Damaged as problem:
        raise ConfigError("loss.teacher.checkpoint", run, f"its model does not fit data={info.name} ({problem})",
                          "train the teacher on the same data") from None  # fmt: skip
    return _fitted(teacher, knows if believed else replace(knows, input_shape=()), info) if knows else teacher
