"""Where do two plans part? A digest of every module's output for each shard of the first windows, to compare runs by.

Written as fingerprint.json when a sweep asks for equal training (`sweep.tolerance`). For the same shard, step 0 sees the same
weights on every plan, so the first module whose digest differs is where to look.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from isobatch.run_folder.files import write_json
from isobatch.shards.layout import Lanes

if TYPE_CHECKING:
    from isobatch.data.feed import MicroBatch
    from isobatch.runtime.distributed import Ranks

STEPS = 2  # windows that are looked at; the first shows the forward, the second what the update made of it


class Fingerprint:
    """Stands in for `Parts.apart`, which is called before each forward and so knows which shards come next."""

    def __init__(self, module: nn.Module, apart: Callable[[int, MicroBatch], AbstractContextManager[None]]):
        self.apart, self.keys, self.lanes = apart, list[str](), Lanes(())
        self.records: dict[str, list[list[str]]] = {}
        self.hooks = [m.register_forward_hook(self._after(name)) for name, m in module.named_modules() if name]
        self.hooks.append(module.register_forward_pre_hook(self._before))
        self.hooks.append(module.register_forward_hook(self._after("output")))

    def __call__(self, step: int, micro: MicroBatch) -> AbstractContextManager[None]:
        # what several devices hold comes as one
        shards = micro.shards if len(micro.lanes.layouts) == 1 else [",".join(map(str, micro.shards))]
        self.keys, self.lanes = [f"{step}/{shard}" for shard in shards] if step < STEPS else [], micro.lanes
        if not self.keys and self.hooks:
            for hook in self.hooks:
                hook.remove()
            self.hooks = []
        return self.apart(step, micro)

    def _before(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if getattr(getattr(module, "fsdp_units", None), "attending", False):
            self.keys = []  # a forward for other ranks' sake
        if module.training:
            for key, found in zip(self.keys, self._digests(arguments), strict=False):
                self.records[key] = [["input", found]]  # afresh, should a window be replayed

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if self.keys and torch.is_grad_enabled() and self.keys[0] in self.records:
                for key, found in zip(self.keys, self._digests(output), strict=True):
                    self.records[key].append([name, found])

        return hook

    def _digests(self, value: Any) -> list[str]:
        """Of each shard's part; of all of it, for each, where it has not so many rows for each sample."""
        if len(self.keys) <= 1:
            return [digest(value)]
        parts = [self._split(leaf) if isinstance(leaf, Tensor) else [leaf] * len(self.keys) for leaf in tree_leaves(value)]
        return [digest(shard) for shard in zip(*parts, strict=True)] if parts else [""] * len(self.keys)

    def _split(self, tensor: Tensor) -> list[Tensor]:
        (layout,) = self.lanes.layouts
        rows = layout.rows(len(tensor)) if tensor.ndim else 0
        return layout.split(tensor.detach()) if rows else [tensor] * len(self.keys)

    def write(self, folder: Path, ranks: Ranks) -> None:
        """fingerprint.json: "<step>/<shard>" -> [[module, digest], ...] in the order of the forward. A collective."""
        gathered = ranks.gather_objects(self.records)
        if gathered is not None:
            write_json(folder / "fingerprint.json", {k: v for records in gathered for k, v in sorted(records.items())})


def digest(value: Any) -> str:
    """Of all tensors in a nest of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        return hashlib.sha256(data.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    if isinstance(value, dict):
        return " ".join(digest(v) for v in value.values())
    if isinstance(value, tuple | list):
        return " ".join(digest(v) for v in value)
    return ""
