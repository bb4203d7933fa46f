"""A copy of the training state in host memory, which training may leave behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isobatch.runtime.host_memory import HostMemory

PLAIN = (bool, int, float, str)
KEPT = (*PLAIN, type(None), Tensor, dict, list, tuple)


class Snapshot:
    """`tree` copied: tensors into host memory of their own, everything else as plain data.

    Each tensor is copied by itself, because a view (batch-norm statistics are views of one flat tensor) would bring its
    whole storage into the file. On CUDA the copies are only queued, on the stream that training uses: later updates
    queue behind them, so the host goes on at once and `ready` waits in the writing thread.

    Args:
        before: the snapshot before, into whose memory this one is copied (fresh memory costs several times the copy).
            Nobody may read that one any more.
    """

    def __init__(self, tree: dict[str, Any], before: Snapshot | None = None):
        found: dict[str, Tensor] = {}
        self.tree: dict[str, Any] = _plain(tree, "", lambda where, tensor: found.setdefault(where, tensor))
        self.memory: dict[str, Tensor] = {}
        self.pieces: list[HostMemory] = [] if before is None else before.pieces
        new: dict[torch.device, list[str]] = {}
        for where, tensor in found.items():
            host = None if before is None else before.memory.get(where)
            if host is not None and (host.shape, host.dtype) == (tensor.shape, tensor.dtype):
                self.memory[where] = host
            else:
                new.setdefault(tensor.device, []).append(where)
        for device, names in new.items():
            # in one piece where it is to be page-locked; of the CPU's, each its own, as torch's allocator likes it
            piece = HostMemory(device if device.type == "cuda" else torch.device("cpu"))
            self.memory.update(zip(names, piece.like([found[name] for name in names]), strict=True))
            self.pieces.append(piece)
        for where, tensor in found.items():
            self.memory[where].copy_(tensor, non_blocking=tensor.device.type == "cuda")
        self.tree = _plain(self.tree, "", lambda where, _: self.memory[where])
        self.events = [torch.cuda.current_stream(device).record_event() for device in {t.device for t in found.values()}
                       if device.type == "cuda"]  # fmt: skip

    def ready(self) -> dict[str, Any]:
        """The copy, complete."""
        for event in self.events:
            event.synchronize()
        return self.tree


def _plain(value: Any, where: str, tensor: Callable[[str, Tensor], Tensor]) -> Any:
    """`value` with only what a file may hold in it, `tensor(path, detached)` in the place of each tensor."""
    if isinstance(value, dict):
        # what is not plain is left out: optimizers keep functions and dtypes among their options
        return {k: _plain(v, f"{where}/{k}", tensor) for k, v in value.items() if isinstance(v, KEPT)}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{where}/{i}", tensor) for i, v in enumerate(value)]
    if isinstance(value, Tensor):
        return tensor(where, value.detach())
    # a subclass (torch.__version__ is one of str) would be a class to import for whoever loads the file
    return next((kind(value) for kind in PLAIN if isinstance(value, kind)), None)


def broken(tree: dict[str, Any]) -> str | None:
    """The name of a tensor that makes a state useless: weights that are not finite, or NaN in the optimizer."""
    for section in ("model", "ema"):
        for name, tensor in (tree[section] or {}).items():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not torch.isfinite(tensor).all():
                return f"{section} {name}"
    for number, entry in tree["optimizer"].get("state", {}).items():
        for name, tensor in entry.items():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and torch.isnan(tensor).any():
                return f"optimizer state {number}.{name}"
    return None
