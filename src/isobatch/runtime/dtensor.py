"""Tensors that are spread over ranks (DTensor), seen as the whole tensors that they stand for.

Everything else passes as it is, so callers need no branch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def in_parts(model: nn.Module) -> bool:
    return any(hasattr(p, "full_tensor") for p in model.state_dict().values())


def whole(tensor: Any) -> Any:
    """The whole of a spread tensor; a collective. Anything else is returned as it is."""
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole_tree(value: Any, keep: bool) -> Any:
    """Nested containers with every spread tensor made whole, one at a time. A collective.

    Args:
        keep: on the CPU; False: this rank only takes part, and gets None in their place.
    """
    if isinstance(value, dict):
        return {key: whole_tree(inner, keep) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [whole_tree(inner, keep) for inner in value]
    if hasattr(value, "full_tensor"):
        gathered = whole(value)
        return gathered.cpu() if keep else None
    return value


def like(tensor: Any, target: Any) -> Any:
    """This rank's part of `tensor`, which is whole, where `target` is spread; else `tensor`. No collective."""
    if not (hasattr(target, "full_tensor") and getattr(tensor, "shape", None) == target.shape):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    local = tensor.to(target.device)
    return distribute_tensor(local, target.device_mesh, target.placements, src_data_rank=None)


def weights_like(saved: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    current = model.state_dict()
    return {name: like(tensor, current.get(name)) for name, tensor in saved.items()}


def optimizer_like(saved: dict[str, Any], parameters: list[Tensor], order: list[Any]) -> dict[str, Any]:
    """An optimizer's state dict with the parts that go with this rank's `parameters`, numbered as in `order`."""
    by_number = dict(zip(order, parameters, strict=True))
    entries = {
        number: {name: like(value, by_number.get(number)) for name, value in entry.items()}
        for number, entry in saved["state"].items()
    }
    return {**saved, "state": entries}
