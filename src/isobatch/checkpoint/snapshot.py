"""A copy of the training state in host memory, which training may leave behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PLAIN = (bool, int, float, str)
KEPT = (*PLAIN, type(None), Tensor, dict, list, tuple)


class Snapshot:
    """`tree` copied: tensors into host memory of their own, everything else as plain data.

    Each tensor is copied by itself, because a view (batch-norm statistics are views of one flat tensor) would bring its
    whole storage into the file. On CUDA the copies are only queued, on the stream that training uses: later updates
    queue behind them, so the host goes on at once and `ready` waits in the writing thread.

    Args:
        memory: path in the tree -> host tensor: what the snapshot before was copied into, used again (fresh memory costs
            several times the copy). Nobody may read that snapshot any more.
    """

    def __init__(self, tree: dict[str, Any], memory: dict[str, Tensor] | None = None):
        self.devices: set[torch.device] = set()
        self.before: dict[str, Tensor] = memory or {}
        self.memory: dict[str, Tensor] = {}
        self.tree: dict[str, Any] = self._copy(tree, "")
        self.events = [torch.cuda.current_stream(device).record_event() for device in self.devices]

    def ready(self) -> dict[str, Any]:
        """The copy, complete."""
        for event in self.events:
            event.synchronize()
        return self.tree

    def _copy(self, value: Any, where: str) -> Any:
        if isinstance(value, dict):
            # what is not plain is left out: optimizers keep functions and dtypes among their options
            return {k: self._copy(v, f"{where}/{k}") for k, v in value.items() if isinstance(v, KEPT)}
        if isinstance(value, list | tuple):
            return [self._copy(v, f"{where}/{i}") for i, v in enumerate(value)]
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), where)
        # a subclass (torch.__version__ is one of str) would be a class to import for whoever loads the file
        return next((kind(value) for kind in PLAIN if isinstance(value, kind)), None)

    def _copy_tensor(self, tensor: Tensor, where: str) -> Tensor:
        on_cuda = tensor.device.type == "cuda"
        host = self.before.get(where)
        if host is None or (host.shape, host.dtype) != (tensor.shape, tensor.dtype):
            host = torch.empty_like(tensor, device="cpu", pin_memory=on_cuda)
        if on_cuda:
            self.devices.add(tensor.device)
        self.memory[where] = host
        return host.copy_(tensor, non_blocking=on_cuda)


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
