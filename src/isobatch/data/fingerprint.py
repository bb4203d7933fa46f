"""What a run was trained on, in a few digests: the number of samples, their names in order, their labels, their contents."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from isobatch.errors import JobFailed

if TYPE_CHECKING:
    from isobatch.data.base import Split


def of(split: Split, contents: bool) -> dict[str, Any]:
    """Equal for the same samples in the same order, wherever they lie.

    Args:
        contents: of files, not only their names. What is in memory is looked at anyway.
    Raises:
        JobFailed: a file cannot be read.
    """
    dataset, found = split.dataset, dict[str, Any](samples=len(split))
    tensors = split.tensors or [t for name in ("images", "labels", "targets") if _is_tensor(t := getattr(dataset, name, None))]
    names: Any = getattr(dataset, "names", None)
    labels: Any = getattr(dataset, "labels", None)
    if tensors and (split.tensors or _is_tensor(getattr(dataset, "images", None))):  # it lies in memory
        found["contents"] = _of_parts(_parts(tensors))
    if hasattr(names, "blob"):
        found["names"] = _of_parts(iter((names.blob, names.ends.astype("<i8").tobytes())))
    if hasattr(labels, "astype"):
        found["labels"] = _of_parts(iter((labels.astype("<i8").tobytes(),)))
    if contents and hasattr(dataset, "data"):
        found["contents"] = _of_parts(_files(split))
    return found


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _parts(tensors: Any) -> Iterator[bytes]:
    import torch

    for tensor in tensors:
        yield f"{tensor.dtype} {list(tensor.shape)}".encode()
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _files(split: Split) -> Iterator[bytes]:
    for index in range(len(split)):
        try:
            data = split.dataset.data(index)
        except OSError as error:
            raise JobFailed(f"data.fingerprint=contents: {split.describe(index)} cannot be read ({error})") from None
        for part in (data, *([split.dataset.beside(index)] if hasattr(split.dataset, "beside") else [])):
            yield len(part).to_bytes(8, "little")
            yield part


def _of_parts(parts: Iterator[bytes]) -> str:
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
