"""`cuda_graph=true`: what is refused, and what takes the place of strategy, working copy, micro step and update.

recording.py records micro steps, recorded_update.py the update, gradients.py keeps gradients where they are, and
parallel/recorded.py adds them over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobatch.errors import ConfigError
from isobatch.parallel.recorded import AllAtOnce
from isobatch.train.gradients import Gradients, KeptInPlace
from isobatch.train.recorded_update import Update
from isobatch.train.recording import MicroSteps
from isobatch.train.step import micro_step

if TYPE_CHECKING:
    from isobatch.config import Config
    from isobatch.precision.masters import WorkingCopy
    from isobatch.runtime.distributed import Ranks

OWN_GRAPHS = "reduce-overhead", "max-autotune"  # values of `compile` that bring CUDA graphs of their own


def check(config: Config, accumulation_steps: int, device: torch.device) -> None:
    """Refuse what cannot be recorded, before anything is trained.

    Raises:
        ConfigError: with the reason and a way out.
    """
    if config.compile in OWN_GRAPHS and device.type == "cuda" and (accumulation_steps > 1 or config.reduction.exact):
        what = "reduction=exact keeps" if config.reduction.exact else f"{accumulation_steps} micro steps add up"
        raise ConfigError("compile", config.compile, f"its CUDA graphs own the gradients that {what} between micro steps",
                          "set compile=max-autotune-no-cudagraphs, or compile=true cuda_graph=true reduction=fast")  # fmt: skip
    if config.cuda_graph and (problem := obstacle(config, device)) is not None:
        raise ConfigError("cuda_graph", True, *problem)


def obstacle(config: Config, device: torch.device) -> tuple[str, str] | None:
    """(reason, way out) why this training cannot be recorded; None: it can."""
    problem = None
    if device.type != "cuda":
        problem = f"records work of CUDA devices, and this run works on {device}", "set cuda_graph=null"
    elif config.reduction.exact:
        problem = "reduction=exact hands gradients on in the middle of a backward", "set reduction=fast or cuda_graph=null"
    elif (reason := config.parallel.not_recordable) is not None:
        problem = reason, "set parallel=ddp (or single) or cuda_graph=null"
    elif config.compile in OWN_GRAPHS:
        problem = f"compile={config.compile} brings CUDA graphs of its own", "set compile=true or cuda_graph=null"
    elif getattr(config.model, "grad_checkpointing", False):
        problem = ("model.grad_checkpointing runs forwards again with saved generators, which cannot be recorded",
                   "set model.grad_checkpointing=false or cuda_graph=null")  # fmt: skip
    elif config.model.batch_norm == "sync":
        problem = "model.batch_norm=sync sends its statistics within the forward", "set model.batch_norm=shard"
    elif getattr(config.optimizer, "sam", None) is not None or "frozen_until" in str(getattr(config.optimizer, "groups", "")):
        problem = ("optimizer.sam and frozen_until change what happens between the recordings",
                   "leave them out, or set cuda_graph=null")  # fmt: skip
    return problem


def chosen(config: Config, working: WorkingCopy, optimizer: torch.optim.Optimizer, ranks: Ranks,
           device: torch.device) -> tuple[WorkingCopy, Any, Callable[..., Tensor | None]]:  # fmt: skip
    """(working copy, strategy, micro step) of a training: as they are, or what `cuda_graph=true` puts in their place."""
    if not config.cuda_graph or device.type != "cuda":  # an evaluation of such a run on another machine
        return working, config.parallel, micro_step
    gradients = Gradients(working.module)
    recorder = MicroSteps(gradients)
    if Update.possible(optimizer):
        optimizer.step = Update(optimizer, recorder.pool)  # type: ignore[method-assign,assignment]
    return KeptInPlace(working, gradients), AllAtOnce(config.parallel, gradients, ranks), recorder
