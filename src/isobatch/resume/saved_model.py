"""A frozen network that teaches: timm's by name, or the model of an earlier run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from isobatch import checkpoint
from isobatch.checkpoint.fitting import fitted_weights
from isobatch.checkpoint.folder import Damaged
from isobatch.config import options
from isobatch.data import DataInfo
from isobatch.errors import ConfigError


def build(chosen: dict[str, Any], info: DataInfo, device: torch.device) -> nn.Module:
    """The teacher in evaluation mode, fp32, without trainable parameters, on `device`. No generator notices.

    Args:
        chosen: arch, pretrained, checkpoint, kwargs (see loss.Distillation).

    Raises:
        ConfigError: no such architecture or run, or one that does not fit the data.
    """
    with torch.random.fork_rng([]):
        teacher = _from_run(chosen["checkpoint"], info) if chosen["checkpoint"] else _from_timm(chosen, info)
    return teacher.to(device).requires_grad_(False).eval()


def _from_timm(chosen: dict[str, Any], info: DataInfo) -> nn.Module:
    node = {"name": "timm", "arch": chosen["arch"], "pretrained": chosen["pretrained"], "kwargs": chosen["kwargs"]}
    try:
        return options("model", node).build(info)  # type: ignore[no-any-return]
    except ConfigError as error:
        raise ConfigError(error.key.replace("model.", "loss.teacher."), error.value, error.problem,
                          error.way_out.replace("model.", "loss.teacher.")) from None  # fmt: skip


def _from_run(run: str, info: DataInfo) -> nn.Module:
    state = checkpoint.load(Path(run))
    # the config in a checkpoint names its model through the table, as every config does; it can never name code
    node = dict(state["config"]["model"])
    for key, value in (("pretrained", False), ("checkpoint_path", None)):  # all weights come from the checkpoint
        if key in node:
            node[key] = value
    teacher: nn.Module = options("model", node).build(info)
    try:
        teacher.load_state_dict(fitted_weights(state.get("ema") or state["model"], teacher.state_dict(), "model"))
    except Damaged as problem:
        raise ConfigError("loss.teacher.checkpoint", run, f"its model does not fit data={info.name} ({problem})",
                          "train the teacher on the same data") from None  # fmt: skip
    return teacher
