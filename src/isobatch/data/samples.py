"""One request in, one batch out: what happens in a worker process, or in the training process when there is none.

Every draw of torch, NumPy or Python's random inside a dataset is seeded for its sample, so a batch does not depend on who
reads it, nor on what was read before.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from isobatch.runtime.randomness import isolated_generators, seed_sample
from isobatch.runtime.trees import PerSample

if TYPE_CHECKING:
    from isobatch.data.base import Split

# what decoders raise for damaged files; PIL uses SyntaxError for broken PNG chunks
UNREADABLE = (OSError, EOFError, SyntaxError, ValueError)
DECODERS = {"PIL", "torchvision", "cv2", "imageio", "tifffile", "skimage", "pydicom", "zlib", "turbojpeg"}
TRIES = 100
IGNORED = -100  # the class number that torch's losses leave out
OBJECT = re.compile(r" <[\w.]+ object at 0x[0-9a-f]+>")  # PIL names the buffer it was given; that tells a person nothing


class Request(NamedTuple):
    """The virtual sample indices (N,) of one micro step, as the sampler numbers them; none of the epoch is above `highest`."""

    epoch: int
    indices: Tensor
    highest: int = sys.maxsize


class HostBatch(NamedTuple):
    """(inputs, targets) in main memory, each a tensor or a tree of them, and what could not be read."""

    inputs: Any
    targets: Any
    replaced: list[str]


@dataclass(frozen=True)
class Failure:
    """A dataset raised: `line` for a person, `trace` for who wrote the dataset. Plain text, so that it can travel."""

    line: str
    trace: str


class Samples:
    """
    Args:
        split: what is read.
        seed: of the run.
        replaces: put the next readable sample in the place of one that cannot be decoded.
        ignored: labels that are no class and yet allowed; None: labels are not looked at.
    """

    def __init__(self, split: Split, seed: int, replaces: bool = False, ignored: Sequence[int] | None = None):
        self.split, self.seed, self.replaces, self.ignored = split, seed, replaces, ignored

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, request: tuple[int, Sequence[int]]) -> HostBatch | Failure:
        """(epoch, virtual indices) -> the batch. The name is the one that torch's DataLoader looks for."""
        epoch, indices = request
        replaced: list[str] = []
        if (turn := getattr(self.split.dataset, "at_epoch", None)) is not None:
            turn(epoch)
        inputs, targets, index = [], [], -1
        try:
            for index in indices:
                one_input, one_target = self._sample(epoch, index, replaced)
                inputs.append(one_input)
                targets.append(one_target)
            index = -1
            channels = self.split.info.in_chans if self.split.info and len(self.split.info.shape) == 3 else None
            collate = getattr(self.split, "collate", None)
            if collate is not None:
                what = "batch"
                return self._labelled(*both(collate(list(zip(inputs, targets, strict=True)))), indices, replaced)
            what = "inputs"
            together = stacked(inputs, channels)
            what, inputs = "targets", targets
            labels = stacked(targets)
            return self._labelled(together, labels, indices, replaced)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | GeneratorExit) and torch.utils.data.get_worker_info() is None:
                raise  # Ctrl-C; a worker does not get to see one, so there it is the dataset's own
            if index < 0:
                return Failure(self._unlike(what, inputs, indices, error), traceback.format_exc())
            line = (
                f"data: {self.split.describe(index % len(self))} could not be read: {type(error).__name__}: {error_line(error)}"
            )
            return Failure(line, traceback.format_exc())

    def _labelled(self, inputs: Any, labels: Any, indices: Sequence[int], replaced: list[str]) -> HostBatch | Failure:
        """The batch, unless one of its labels is none of the classes: on a device nobody could say whose it was."""
        ignored = self.ignored or ()
        classes = self.split.info.num_classes if self.split.info and self.ignored is not None else 0
        if classes and isinstance(labels, Tensor) and labels.ndim == 1 and labels.dtype == torch.int64 and len(labels):
            low, high = map(int, labels.aminmax())
            wrong = -1 if low >= 0 and high < classes else next(
                (k for k, n in enumerate(labels.tolist()) if not 0 <= n < classes and n not in ignored), -1)  # fmt: skip
            if wrong >= 0:
                one = self.split.describe(indices[wrong] % len(self))
                line = f"data: {one} has the label {int(labels[wrong])}, and the classes are 0 to {classes - 1}"
                return Failure(f"{line}: number them from 0, or set data.num_classes", "")
        return HostBatch(inputs, labels, replaced)

    def _unlike(self, what: str, values: Sequence[Any], indices: Sequence[int], error: BaseException) -> str:
        """The line for a batch that cannot be put together: the first sample that differs from the batch's first one."""
        if what == "batch":
            some = " and ".join(dict.fromkeys(self.split.describe(indices[k] % len(self)) for k in (0, -1)))
            return f"data: data.collate makes no batch of {some} ({type(error).__name__}: {error_line(error)})"
        forms = [form(value) for value in values]
        odd = next((k for k, other in enumerate(forms) if other != forms[0]), 0)
        one = f"data: the {what[:-1]} of {self.split.describe(indices[odd] % len(self))} is {forms[odd]}"
        other = f", and that of {self.split.describe(indices[0] % len(self))} is {forms[0]}" if odd else ""
        return f"{one}{other}: no batch can be made of such {what} ({type(error).__name__}: {error_line(error)})"

    def isolated(self, request: tuple[int, Sequence[int]]) -> HostBatch | Failure:
        """The same in the training process, whose generators stay as they are."""
        with isolated_generators():
            return self.__getitems__(request)

    def _sample(self, epoch: int, index: int, replaced: list[str]) -> tuple[Any, Any]:
        n = len(self)
        for k in range(min(n, TRIES)):
            seed_sample(self.seed, epoch, index)
            try:
                sample = self.split.dataset[(index + k) % n]
                break
            except Exception as error:
                if not self.replaces or k + 1 == min(n, TRIES) or not damaged(error):
                    raise
                replaced.append(f"{self.split.describe((index + k) % n)}: {error_line(error)}")
        if not isinstance(sample, (tuple, list)) or len(sample) != 2:
            raise TypeError(f"a dataset has to return (input, target), this one returned {type(sample).__name__}")
        return sample[0], sample[1]


def ignored_by(criterion: Any) -> tuple[int, ...]:
    """Labels that are no class, which `criterion` leaves out, or refuses in its own words."""
    own = getattr(criterion, "ignore_index", None)
    return (IGNORED,) if own is None else (IGNORED, int(own))


def damaged(error: Exception) -> bool:
    """Whether `error` means a file that cannot be decoded: by its kind, or because it comes out of a decoder's own code.

    Anything else a dataset raises is a mistake in it, and a replacement would hide that.
    """
    if isinstance(error, MemoryError):
        return False
    modules = {frame.f_globals.get("__name__", "").split(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)}
    return isinstance(error, UNREADABLE) or bool(modules & DECODERS)


def form(value: Any) -> str:
    """What a value is, in a few words."""
    shape, kind = getattr(value, "shape", None), type(value).__name__
    if shape is not None:
        return f"{str(value.dtype).removeprefix('torch.')} {list(shape)}"
    size = getattr(value, "size", None)  # PIL's
    return f"{kind} {size[0]} x {size[1]}" if isinstance(size, tuple) else f"a {kind}"


def error_line(error: BaseException) -> str:
    """The error's text in one line."""
    return OBJECT.sub("", " ".join(str(error).split()))


def both(batch: Any) -> tuple[Any, Any]:
    """What a user's collate gives, which is (inputs, targets).

    Raises:
        TypeError: it is not.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(f"a collate has to return (inputs, targets), this one returned {type(batch).__name__}")
    return batch[0], batch[1]


def stacked(values: list[Any], channels: int | None = None) -> Any:
    """The inputs or targets of a batch, each with one dimension more: tensors, arrays, numbers or PIL images (as uint8
    C, H, W); tuples, lists and dicts of these member by member; text as a list.

    Images whose rows hold interleaved channels stay so (channels_last), which saves a transpose per image.
    """
    first = values[0]
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in values):
            raise ValueError(f"the samples of a batch have different keys, {list(first)} among them")
        return {key: stacked([value[key] for value in values], channels) for key in first}
    if isinstance(first, tuple | list) and not all(isinstance(member, bool | int | float) for member in first):
        if any(len(value) != len(first) for value in values):
            raise ValueError("the samples of a batch are lists of different lengths: name a data.collate for them")
        members = [stacked(list(column), channels) for column in zip(*values, strict=True)]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    if isinstance(first, str | bytes) or first is None:
        return PerSample(values)
    if isinstance(first, bool | int):
        return torch.tensor(values, dtype=torch.int64)
    if isinstance(first, float):
        return torch.tensor(values, dtype=torch.float32)
    if not isinstance(first, Tensor):
        if hasattr(first, "getbands"):  # a PIL image
            from isobatch.pixels import as_pixels

            values = [as_pixels(value, channels) for value in values]
        else:
            values = [torch.as_tensor(value) for value in values]
        first = values[0]
    if any(value.shape != first.shape for value in values):
        shapes = sorted({tuple(value.shape) for value in values})[:3]
        raise ValueError(f"the samples of a batch have different shapes, {', '.join(map(str, shapes))}: bring them to one, or "
                         "name a data.collate for them")  # fmt: skip
    if first.ndim == 3 and not first.is_contiguous() and first.permute(1, 2, 0).is_contiguous():
        return torch.stack([value.permute(1, 2, 0) for value in values]).permute(0, 3, 1, 2)
    return torch.stack(values)
