"""Stops, changes and damage for tests of checkpoints and resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Record, train

from isobatch.errors import Stopped
from isobatch.launch.signals import STOP


def train_and_stop(folder: Path, after: int, *overrides: str, **more: Any) -> list[int]:
    """Train, and get SIGTERM during step `after`; returns the ids that were read, step by step."""
    ids: list[list[int]] = []

    def observe(state: Any, parts: Any, window: Any) -> None:
        ids.append([int(t) for m in window.micro_batches for t in m.targets.reshape(len(m.targets), -1)[:, 0]])
        if state.step + 1 == after:
            STOP.requested = 15

    try:
        with pytest.raises(Stopped):
            train(folder, *overrides, observe=observe, **more)
    finally:
        STOP.requested = 0
    return ids


def state_of(run: Path, which: str = "last") -> dict[str, Any]:
    return torch.load(run / "checkpoints" / which / "state.pt", weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Equal to the bit, containers and tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def training(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a saved state that training changes."""
    return {k: state[k] for k in ("model", "optimizer", "scaler", "ema", "reducer", "counters")}


def digest(folder: Path) -> str:
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(folder.iterdir()))).hexdigest()


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """What somebody with write access can do: other contents under a manifest that agrees with them."""
    state = torch.load(path / "state.pt", weights_only=True)
    changed = change(state)
    torch.save(state if changed is None else changed, path / "new")
    (path / "new").replace(path / "state.pt")
    reseal(path)


def reseal(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (path / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "new").write_text(json.dumps(manifest))
    (path / "new").replace(path / "manifest.json")


def cut(file: Path, size: int | None = None) -> None:
    """Replace a file (not its other hard links) by its first half."""
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[: len(data) // 2 if size is None else size])


__all__ = ["Record", "cut", "digest", "reseal", "rewrite", "same", "state_of", "train", "train_and_stop", "training"]
