"""Where two runs of one shard part: the module, what of it, and what helps."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from isobatch.run_folder.fingerprint import digest

LOSS = "the loss"


class RunOfShard(Protocol):
    """What one run of a shard gave."""

    working: nn.Module
    diary: Diary | None
    loss: Tensor | None
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Diary(AbstractContextManager):
    """What the modules of a model give, in the order in which they do, uncompiled.

    `outputs`: (module, digest) as forwards end. `gradients`: parameters in the order in which their gradients are there.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.outputs: list[tuple[str, str]] = []
        self.gradients: list[str] = []

    def __enter__(self) -> Diary:
        self.handles: list[Any] = [m.register_forward_hook(self._after(name)) for name, m in self.model.named_modules() if name]
        self.handles += [p.register_post_accumulate_grad_hook(lambda _, name=name: self.gradients.append(name))
                         for name, p in self.model.named_parameters() if p.requires_grad]  # fmt: skip
        self.stance = torch.compiler.set_stance("force_eager")
        self.stance.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.stance.__exit__(None, None, None)
        for handle in self.handles:
            handle.remove()

    def _after(self, name: str) -> Any:
        return lambda module, arguments, output: self.outputs.append((name, digest(output)))


@dataclass
class OddShard:
    """
    Args:
        forward: the loss or a buffer differs already; then `names` are buffers, else parameters (by their gradient).
        names: of all that differ. distance: largest, relative to the largest gradient (buffers and loss: to themselves);
            infinite beside a NaN.
        counts: of each name, values that differ and all values. kinds: module -> class.
    """

    forward: bool
    names: list[str]
    distance: float
    counts: dict[str, tuple[int, int]]
    kinds: dict[str, str]
    module: str = ""
    text: str = ""

    def located(self, one: RunOfShard, two: RunOfShard) -> OddShard:
        """With the module that parts first, from two more runs that kept a diary."""
        assert one.diary is not None and two.diary is not None
        if self.forward:
            apart = [name for (name, a), (_, b) in zip(one.diary.outputs, two.diary.outputs, strict=False) if a != b]
            self.module = apart[0] if apart else self._owner(self.names[0]) if self.names else ""
            self.text = "whose output differs" if apart or not self.names else "whose statistics differ"
            return self
        order = [name for name in one.diary.gradients if name in self.counts]
        first = (order or self.names[::-1])[0]  # weights in parts tell no order: then from the last to the first
        changed, size = self.counts[first]
        self.module, self.text = self._owner(first), f"whose gradient differs ({changed:,} of {size:,} values of {first})"
        return self

    def _owner(self, name: str) -> str:
        return name.rpartition(".")[0]

    def __str__(self) -> str:
        if self.forward and not self.module:
            return "the loss differs already"
        named = f"{self.module} ({self.kinds[self.module]})" if self.module else f"the model ({self.kinds['']})"
        return f"{named} is the first module {self.text}"


class Gap(NamedTuple):
    """Two tensors: their largest distance and the largest value (infinite beside a NaN), values that differ, all values."""

    distance: float
    largest: float
    changed: int
    size: int


def compare(one: RunOfShard, two: RunOfShard) -> OddShard | None:
    """What differs between two runs; None: nothing."""
    forward = {name: pair(value, two.buffers.get(name)) for name, value in one.buffers.items()}
    forward[LOSS] = None if one.loss is None else pair(one.loss, two.loss)
    backward = {name: pair(one.gradients.get(name), two.gradients.get(name)) for name in one.gradients | two.gradients}
    early, late = ({name: apart for name, apart in pairs.items() if apart} for pairs in (forward, backward))
    if not early and not late:
        return None
    # a gradient that is nothing but rounding (a bias before a norm) is measured by those that are more
    scale = max((float(g.abs().max()) for g in one.gradients.values() if g.numel()), default=0.0)
    distances = [a.distance / (a.largest or 1.0) for a in early.values()] + [a.distance / (scale or 1.0) for a in late.values()]
    return OddShard(
        bool(early), [name for name in early or late if name != LOSS],
        max((math.inf if math.isnan(d) else d for d in distances), default=0.0),
        {name: (a.changed, a.size) for name, a in (early or late).items()},
        {name: type(m).__name__ for name, m in one.working.named_modules()},
    )  # fmt: skip


def pair(a: Tensor | None, b: Tensor | None) -> Gap | None:
    """None = the same bits. Any NaN is as good as another."""
    if a is None or b is None or a.shape != b.shape:
        size = next(t.numel() for t in (a, b) if t is not None)
        return Gap(math.inf, math.inf, size, size)
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    same = (bits(a) == bits(b)) | (a.isnan() & b.isnan())
    if same.all():
        return None
    apart = [float(value.abs().max().nan_to_num(math.inf)) for value in (a.double() - b.double(), a.double())]
    return Gap(apart[0], apart[1], int((~same).sum()), a.numel())


def bits(tensor: Tensor) -> Tensor:
    """The bits of real numbers as integers, in the same shape."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()]) if tensor.is_floating_point() else tensor


def way_out(device: torch.device) -> str:
    """What helps against kernels that differ from call to call on this kind of device."""
    if device.type == "cpu":
        return ("set another precision (precision=fp32), another size of images or layers (no convolution over a map smaller "
                "than its kernel), or start with ONEDNN_MAX_CPU_ISA=AVX2 in the environment; a random draw has to come from "
                "torch's own generators")  # fmt: skip
    return ("set deterministic=true, which refuses operations that cannot, another precision (precision=fp32) or another "
            "size of images or layers; a random draw has to come from torch's own generators")  # fmt: skip
