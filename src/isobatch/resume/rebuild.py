"""A model that was trained, made again: from the checkpoint of a run, from a file of weights, or from timm's own.

The one place where a saved model is built: a teacher, an export, predictions and `isobatch.load` all come here. What is read
is data: names reach classes through the tables, weights are tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from isobatch import config as configuration
from isobatch.checkpoint.fitting import fitted_weights
from isobatch.checkpoint.reading import Saved, chosen, no_ema
from isobatch.data import DataInfo
from isobatch.errors import ConfigError
from isobatch.resume import weights_know
from isobatch.resume.signature import Signature

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from isobatch.model import Model

MOST_VALUES = 2**28  # of one input: what a checkpoint says of its data is not trusted with the memory
FIRST_WEIGHTS: dict[str, Any] = {"pretrained": False, "checkpoint_path": None}  # options that fetch or read them: off
TRAINED = FIRST_WEIGHTS | {"grad_checkpointing": False}


@dataclass(frozen=True)
class Trained:
    """
    Args:
        network: in evaluation mode, fp32, on the CPU, without trainable parameters.
        info: of the data that it takes.
        node: its options, as in a config.
        origin: where it comes from, in words. which: of its weights, `ema` or `raw`. step: of training, None = not known.
    """

    network: nn.Module
    info: DataInfo
    node: dict[str, Any]
    origin: str
    which: str = "raw"
    step: int | None = None


def network(node: Mapping[str, Any], info: DataInfo, weights: Mapping[str, Any]) -> nn.Module:
    """The model that `node` describes, with `weights`: nothing is fetched, and no file that it once began with is read.

    Raises:
        ConfigError: it is one of the user's own and not registered, or cannot be built. Damaged: the weights do not fit it.
    """
    try:
        options = configuration.options("model", alone(node))
    except ConfigError as refusal:
        if refusal.key != "model.name":
            raise
        raise ConfigError("model.name", refusal.value, "the run's model is one of your own, and is not registered",
                          "type imports=[...] again, as in training") from None  # fmt: skip
    model: nn.Module = options.build(info)
    model.load_state_dict(fitted_weights(weights, model.state_dict(), "model"))
    return model.float().requires_grad_(False).eval()


def alone(node: Mapping[str, Any]) -> dict[str, Any]:
    """A model's options, as saved, without the weights that it began with and what is for its training alone."""
    return dict(node) | {key: value for key, value in TRAINED.items() if key in node}


def without_first_weights(options: Model) -> Model:
    """A model's options, for weights that are about to be laid into it: none are fetched or read from elsewhere."""
    return replace(options, **{key: value for key, value in FIRST_WEIGHTS.items() if hasattr(options, key)})


def sound(shape: Any) -> bool:
    """Whether what a checkpoint says of the shape of its inputs can be one, and is no more than memory is given for."""
    sizes = isinstance(shape, list | tuple) and shape and all(type(n) is int and n > 0 for n in shape)
    return bool(sizes) and math.prod(shape) <= MOST_VALUES


def of_run(saved: Saved, options: Any) -> Trained:
    """The model of a checkpoint. options: group `checkpoint`, which names its weights.

    Raises:
        ConfigError: an average is asked for that is not there, or the model cannot be built from what is saved.
    """
    from isobatch.checkpoint.folder import Damaged

    if options.weights == "ema" and not saved.state["ema"]:
        raise no_ema(saved)
    which, node, info = chosen(saved, options), alone(saved.state["config"]["model"]), data_info(saved)
    try:
        model = network(node, info, saved.state["ema" if which == "ema" else "model"])
    except Damaged as problem:
        raise ConfigError("resume", saved.path, f"does not fit its own model: {problem}", "use another checkpoint") from None
    return Trained(model, info, node, str(saved.path), which, saved.step)


def of_weights(options: Any, node: Mapping[str, Any]) -> Trained:
    """The model of group `model` with the weights that it begins with: a file's, or timm's own.

    Raises:
        ConfigError: it begins with none, or nothing says what its outputs stand for.
    """
    known = weights_know.of(options, for_evaluation=True)
    if known is None:
        raise ConfigError("model.pretrained", getattr(options, "pretrained", None), f"model={options.name} has no trained "
                          "weights here", "set resume=RUN, model.checkpoint_path=FILE or model.pretrained=true")  # fmt: skip
    if not known.signature.num_classes:
        raise ConfigError("model.checkpoint_path" if known.file else "model.arch", known.file or options.arch,
                          "nothing says how many classes these weights know", "use weights with a classifier")  # fmt: skip
    info = known.info()
    model: nn.Module = options.build(info)
    return Trained(model.float().requires_grad_(False).eval(), info, dict(node), known.origin)


def data_info(saved: Saved) -> DataInfo:
    """What the checkpoint says of the data that its model takes."""
    plan = saved.state["plan"]
    shape, classes = plan.get("input_shape"), plan.get("num_classes")
    if not isinstance(shape, list) or not sound(shape) or type(classes) is not int or not 0 <= classes < 2**31:
        raise ConfigError("resume", saved.path, "says nothing sound of the shape of its data", "use another checkpoint")
    known = Signature.read(plan) or Signature()
    return weights_know.info_of(replace(known, input_shape=tuple(shape), num_classes=classes), "export")


def best_or_last(run: Path) -> str:
    """The checkpoint that is meant where none is named: the best, where there is one."""
    from isobatch.run_folder import layout

    return "best" if (run / layout.CHECKPOINTS / "best").is_dir() else "last"
