"""Where do two plans part? A digest of every module's output for each shard of the first windows, to compare runs by.

Written as fingerprint.json when a sweep asks for equal training (`sweep.tolerance`). For the same shard, step 0 sees the same
weights on every plan, so the first module whose digest differs is where to look.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isobatch.run_folder.files import write_json

if TYPE_CHECKING:
    from isobatch.runtime.distributed import Ranks
    from isobatch.runtime.randomness import ShardSeeder

STEPS = 2  # windows that are looked at; the first shows the forward, the second what the update made of it


class Fingerprint:
    """Stands in for the seeder of shards, which is called before each forward and so knows which shard comes next."""

    def __init__(self, module: nn.Module, seed: ShardSeeder):
        self.seed, self.key = seed, ""
        self.records: dict[str, list[list[str]]] = {}
        self.hooks = [m.register_forward_hook(self._after(name)) for name, m in module.named_modules() if name]
        self.hooks.append(module.register_forward_pre_hook(self._before))
        self.hooks.append(module.register_forward_hook(self._after("output")))

    def __call__(self, step: int, shards: tuple[int, ...]) -> None:
        self.seed(step, shards)
        self.key = f"{step}/{','.join(map(str, shards))}" if step < STEPS else ""
        if not self.key and self.hooks:
            for hook in self.hooks:
                hook.remove()
            self.hooks = []

    def __getattr__(self, name: str) -> Any:  # what else a seeder does
        if name == "seed":
            raise AttributeError(name)
        return getattr(self.seed, name)

    def _before(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if getattr(getattr(module, "shards", None), "attending", False):
            self.key = ""  # a forward for other ranks' sake
        if self.key and module.training:
            self.records[self.key] = [["input", digest(arguments)]]  # afresh, should a window be replayed

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if self.key and torch.is_grad_enabled() and self.key in self.records:
                self.records[self.key].append([name, digest(output)])

        return hook

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
