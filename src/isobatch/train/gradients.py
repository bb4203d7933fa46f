"""Gradients that stay where they are: views of one flat tensor per type, so that recorded work finds them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from isobatch.precision.masters import WorkingCopy

if TYPE_CHECKING:
    from isobatch.runtime.distributed import Ranks


class Gradients:
    """Those of `module`'s parameters. The first window is run as always; it shows which parameters get one on any rank.

    Attributes:
        flat: one tensor per dtype, filled by backward through the parameters' views of it; empty until `attach`.
    """

    def __init__(self, module: nn.Module):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.views: list[tuple[nn.Parameter, Tensor]] = []
        self.without: list[nn.Parameter] = []
        self.flat: list[Tensor] = []

    def attach(self, ranks: Ranks) -> None:
        """Move the gradients that are there into flat tensors, and leave the parameters views of them. A collective."""
        mine = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.int64)
        used = ranks.all_reduce(mine, "max").tolist()
        self.without = [p for p, is_used in zip(self.parameters, used, strict=True) if not is_used]
        groups: dict[torch.dtype, list[nn.Parameter]] = {}
        for p, is_used in zip(self.parameters, used, strict=True):
            if is_used:
                groups.setdefault(p.grad_dtype or p.dtype, []).append(p)
        for dtype, members in groups.items():
            flat = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=members[0].device)
            self.flat.append(flat)
            offset = 0
            for p in members:
                # as the weight lies in memory, which is how backward writes it and the optimizer reads both
                dense = p.is_contiguous() or p.is_contiguous(memory_format=torch.channels_last)
                view = flat[offset : offset + p.numel()].as_strided(
                    p.shape, p.stride() if dense else torch.empty_like(p, memory_format=torch.contiguous_format).stride()
                )
                if p.grad is not None:
                    view.copy_(p.grad)
                p.grad = view
                self.views.append((p, view))
                offset += p.numel()

    def zero(self) -> None:
        """Before a window's first backward."""
        for p in self.without:
            p.grad = None
        if self.flat:
            torch._foreach_zero_(self.flat)

    def reset(self) -> None:
        """`zero`, and the views are put back wherever somebody has taken them away."""
        for p, view in self.views:
            p.grad = view
        self.zero()

    def values(self) -> list[Tensor]:
        """A copy of all."""
        return [flat.clone() for flat in self.flat]

    def put(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self.flat, values)


class KeptInPlace(WorkingCopy):
    """A working copy whose gradients are never set to None once they are attached."""

    def __init__(self, inner: WorkingCopy, gradients: Gradients):
        self.inner, self.gradients = inner, gradients
        self.module, self.pairs = inner.module, inner.pairs

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        if self.gradients.flat:
            self.gradients.zero()
        else:
            self.inner.zero_grad(optimizer)

    def pull_gradients(self) -> None:
        """Half weights collect in fp32 (HalfCopy), so their masters share the very gradient."""
        for half, master in self.pairs:
            master.grad = half.grad

    def push_weights(self) -> None:
        self.inner.push_weights()
