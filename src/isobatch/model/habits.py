"""What a model of somebody's own may do that a training here cannot follow: settled, or one line, before it is on a device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from isobatch.errors import ConfigError


def settle(model: nn.Module, name: str) -> list[str]:
    """Bring `model` to what checkpoints, averages and every optimizer take. Returns lines for a person.

    Raises:
        ConfigError: it keeps state that is no tensor.
    """
    for where, module in model.named_modules():
        _copyable(module)
        _plain(where, module, name)
    dense = [where for where, module in model.named_modules() if _made_dense(module)]
    return [f"gradients of {', '.join(dense)} are dense: optimizers and sums over ranks want whole ones"] if dense else []


def _copyable(module: nn.Module) -> None:
    """The old torch.nn.utils.weight_norm keeps the weight as a result, which nobody can copy; each forward makes it anew."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            setattr(module, hook.name, getattr(module, hook.name).detach())


def _plain(where: str, module: nn.Module, name: str) -> None:
    """What `get_extra_state` gives is a tensor, as everything else in a file of weights."""
    if type(module).get_extra_state is nn.Module.get_extra_state:
        return
    state = module.get_extra_state()
    if not isinstance(state, Tensor):
        part = where or type(module).__name__
        raise ConfigError("model.name", name, f"its part {part} keeps a {type(state).__name__} with its weights "
                          "(get_extra_state), and a file of weights holds tensors alone",
                          "return a tensor there, or register a buffer")  # fmt: skip


def _made_dense(module: nn.Module) -> bool:
    """The same numbers: a sparse gradient only leaves zeros out."""
    if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) or not module.sparse:
        return False
    module.sparse = False
    return True
