"""Digests of tensors and of a whole train state: 64 bits each, so that a rank's can be compared with another's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from isobatch.train.state import TrainState

SIZE = 8  # bytes of a digest: an unequal pair looks equal once in 1.8e19


def of_bytes(data: Any) -> str:
    """Of anything with a buffer."""
    return hashlib.blake2b(data, digest_size=SIZE).hexdigest()


def of_tensor(tensor: Tensor | None) -> str:
    """Of dtype, shape and every bit; "" for no tensor. One tensor at a time is in main memory, so nothing is copied twice."""
    if tensor is None:
        return ""
    data = tensor.detach()
    if data.layout is not torch.strided:
        data = data.to_dense()
    data = data.cpu().contiguous()
    found = hashlib.blake2b(f"{data.dtype}{tuple(data.shape)}".encode(), digest_size=SIZE)
    if data.numel():
        found.update(data.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def of_all(parts: Iterable[str]) -> str:
    """Of many digests, in their order."""
    return of_bytes("\n".join(parts).encode())


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) of a nest of mappings and sequences; mappings in the order of their keys' text."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from leaves(inner, f"{name}.{place}")
    else:
        yield name, value


def of_state(state: TrainState) -> dict[str, str]:
    """Name -> digest of all that training goes on from: weights, optimizer state, EMA, scaler, counters.

    The optimizer's tensors bear the name of their parameter. What no update reads (best metrics, the logger's run) is left out.
    """
    names = {id(p): name for name, p in state.model.named_parameters()}
    found = {f"model.{name}": of_tensor(tensor) for name, tensor in sorted(state.model.state_dict().items())}
    for number, (parameter, entry) in enumerate(state.optimizer.state.items()):
        for name, leaf in leaves(entry, f"optimizer.{names.get(id(parameter), number)}"):
            found[name] = _of_leaf(leaf)
    if state.ema is not None:
        found |= {f"ema.{name}": of_tensor(tensor) for name, tensor in sorted(state.ema.module.state_dict().items())}
    found["scaler"] = _of_leaf(state.scaler.state_dict())
    found["counters"] = _of_leaf([state.step, state.update, state.skipped_steps, state.samples])
    return found


def _of_leaf(leaf: Any) -> str:
    return of_tensor(leaf) if isinstance(leaf, Tensor) else of_bytes(json.dumps(leaf, sort_keys=True, default=str).encode())
