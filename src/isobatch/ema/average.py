"""timm's ModelEmaV3 in a handful of kernels, beside the model or on another device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.runtime.host_memory import HostMemory
from isobatch.runtime.timm_import import timm


class Average(timm.utils.ModelEmaV3):  # type: ignore[misc]
    """The average of the weights; buffers are copied, all of a kind at once (timm: one kernel for each)."""

    def apply_update_no_buffers_(self, model: nn.Module, decay: float) -> None:
        self._foreach_lerp_(list(self.module.parameters()), list(model.parameters()), weight=1.0 - decay)
        adopt_buffers(self.module, model)
        copy_all(list(self.module.buffers()), list(model.buffers()))


class DistantAverage:
    """An average on another device than the model's, which costs the host no wait.

    An update sends the model's weights off and averages those that the update before has sent, which have long arrived.

    Args:
        average: of the model, already where it is to be.
    """

    def __init__(self, average: Average, model: nn.Module, device: torch.device):
        self.average, self.source = average, next(model.parameters()).device
        average.module.to(device)
        self.sent = copy.deepcopy(average.module)
        self.sent.load_state_dict(model.state_dict())
        if device.type == "cpu":
            memory = HostMemory(self.source)
            with torch.no_grad():
                for tensor, pinned in zip(tensors := state_of(self.sent), memory.like(tensors), strict=True):
                    tensor.data = pinned.copy_(tensor)
            self.memory = memory
        self.under_way: tuple[Any, int] | None = None

    @property
    def module(self) -> nn.Module:
        """The average, with all updates in it."""
        self._take_in()
        return self.average.module  # type: ignore[no-any-return]

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        self._take_in()
        adopt_buffers(self.sent, model)
        for tensor, value in zip(state_of(self.sent), state_of(model), strict=True):
            tensor.copy_(value, non_blocking=True)
        self.under_way = torch.accelerator.current_stream(self.source).record_event(), step

    def _take_in(self) -> None:
        if self.under_way is not None:
            (done, step), self.under_way = self.under_way, None
            done.synchronize()
            self.average.update(self.sent, step=step)


class PlainMean:
    """The mean of the weights and running statistics at updates `start`, `start` + `every`, ...; before, a copy of the latest.

    How many are in it follows from the update alone, so a resume needs no count.
    """

    def __init__(self, model: nn.Module, start: int, every: int):
        self.start, self.every = start, every
        self.module = copy.deepcopy(model)
        for p in self.module.parameters():
            p.requires_grad_(False)
        if any(p.dtype.itemsize == 2 for p in model.parameters()):  # a mean in half (O3) would lose what is averaged
            self.module.float()
        self.module.eval()

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """`step`: one more than the updates that have been applied."""
        adopt_buffers(self.module, model)
        since = step - 1 - self.start
        if since > 0 and since % self.every:
            return
        before = max(0, since // self.every)
        mine, theirs = state_of(self.module), state_of(model)
        if before == 0:
            copy_all(mine, theirs)
            return
        means = [(a, b) for a, b in zip(mine, theirs, strict=True) if a.is_floating_point()]
        counts = [(a, b) for a, b in zip(mine, theirs, strict=True) if not a.is_floating_point()]
        torch._foreach_lerp_([a for a, _ in means], [b.to(a.dtype) for a, b in means], 1 / (before + 1))
        copy_all([a for a, _ in counts], [b for _, b in counts])


def adopt_buffers(copied: nn.Module, model: nn.Module) -> None:
    """Give a copy of a model the buffers that the model has registered since (in its first forward, say)."""
    if len(list(copied.buffers())) == len(list(model.buffers())):
        return
    device = next(copied.parameters()).device
    for name, module in model.named_modules():
        other = copied.get_submodule(name)
        for key, buffer in module.named_buffers(recurse=False):
            if key not in other._buffers or other._buffers[key] is None:
                other.register_buffer(key, buffer.detach().to(device, copy=True))


def state_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """sources -> targets, a kernel for each pair of dtypes."""
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        mine = groups.setdefault((target.dtype, source.dtype), ([], []))
        mine[0].append(target)
        mine[1].append(source)
    for to, values in groups.values():
        torch._foreach_copy_(to, values)
