"""Random damage to a checkpoint and to a config: one clear line or a correct run; never code, a hang or a bare crash.

ISOBATCH_FUZZ=1000 makes it that many of each.
"""

from __future__ import annotations

import copy
import functools
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tools import reseal, rewrite
from harness import mean_probe, plain

from isobatch import run
from isobatch.errors import ConfigError, JobFailed
from isobatch.runtime.distributed import Ranks

COUNT = int(os.environ.get("ISOBATCH_FUZZ", "40"))
NAMES = ("state.pt", "model.safetensors", "manifest.json")
SETTING = ("epochs=null", "steps=3", "eval_every=3", "batch.effective=4", "optimizer=adamw", "ema=ema", "optimizer.lr=0.1")
VALUES: list[Callable[[], Any]] = [
    lambda: None, lambda: True, lambda: -1, lambda: 0, lambda: 3, lambda: 2**70, lambda: float("nan"), lambda: float("-inf"),
    lambda: "", lambda: "../../etc/passwd", lambda: "x" * 10_000, lambda: "${oc.env:HOME}", list, dict,
    lambda: [[[[1]]]], lambda: {"name": "os.system"}, lambda: {"_target_": "os.system"}, lambda: {1: {2: {}}},
]  # fmt: skip
TENSORS: list[Callable[[], Any]] = [
    lambda: torch.zeros(0), lambda: torch.ones(3, 5), lambda: torch.ones(1, dtype=torch.int64),
    lambda: torch.ones(1, 1, dtype=torch.complex64), lambda: torch.zeros(1).expand(10**12), lambda: torch.full((1,), torch.nan),
    lambda: torch.ones(1, 1).to_sparse(), lambda: torch.tensor(True), lambda: torch.ones(1, 1, dtype=torch.float64),
    lambda: torch.ones(2)[:1], lambda: torch.empty(1, device="meta"), lambda: torch.tensor(-5.0),
]  # fmt: skip


def places(tree: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) in a tree of dicts and lists."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        found.append((tree, key))
        if isinstance(tree[key], dict | list):
            places(tree[key], found)
    return found


def mutate(tree: Any, dice: random.Random, values: list[Callable[[], Any]]) -> str:
    container, key = dice.choice(places(tree, []))
    action = dice.choice(["replace", "replace", "replace", "delete", "add", "wrap"])
    if action == "delete":
        del container[key]
    elif action == "add" and isinstance(container, dict):
        container[dice.choice(["x", "__class__", "../y", 7])] = dice.choice(values)()
    elif action == "wrap":
        container[key] = [container[key]]
    else:
        container[key] = dice.choice(values)()
    return f"{action} {key!r}"


def corrupt(path: Path, dice: random.Random) -> str:
    """Bytes of one file, with or without a manifest that agrees."""
    file = path / dice.choice(NAMES)
    data = bytearray(file.read_bytes())
    action = dice.choice(["flip", "flip", "cut", "insert", "empty", "swap", "remove"])
    if action == "flip":
        for _ in range(dice.choice([1, 10])):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif action == "cut":
        del data[dice.randrange(len(data)) :]
    elif action == "insert":
        at = dice.randrange(len(data))
        data[at:at] = dice.randbytes(dice.choice([1, 100]))
    elif action == "empty":
        data.clear()
    elif action == "swap":
        data = bytearray((path / dice.choice(NAMES)).read_bytes())
    file.unlink()
    if action != "remove":
        file.write_bytes(bytes(data))
        if dice.random() < 0.7 and file.name != "manifest.json":
            reseal(path)
            return f"{action} {file.name}, resealed"
    return f"{action} {file.name}"


def outcome(config: dict[str, Any], folder: Path) -> str:
    """How a run ends. Anything but done, refused or failed in one line is raised."""
    folder.mkdir()
    line = "done"
    try:
        run.run_job(config, folder, Ranks())
    except (ConfigError, JobFailed) as error:
        line = str(error)
    assert line and "\n" not in line
    return line


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    config = plain(*mean_probe([float(i) / 12 for i in range(12)]), *SETTING)
    assert outcome(config, tmp_path / "base") == "done"
    return config


def test_mutations_of_a_checkpoint(tmp_path: Path, base: dict[str, Any], caplog) -> None:
    caplog.set_level("ERROR")
    more = {**base, "resume": str(tmp_path / "run"), "steps": 4, "checkpoint": {**base["checkpoint"], "every_minutes": None}}
    endings = []
    for seed in range(COUNT):
        dice = random.Random(seed)
        path = tmp_path / "run/checkpoints/last"
        shutil.copytree(tmp_path / "base/checkpoints/last", path)
        what: list[str] = []
        try:
            if dice.random() < 0.35:
                what.append(corrupt(path, dice))
            else:
                rewrite(path, lambda state, dice=dice, what=what: what.append(mutate(state, dice, VALUES + TENSORS * 2)))
            endings.append(outcome(more, tmp_path / "out"))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {what}") from error
        finally:
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert 0.05 < endings.count("done") / COUNT < 0.7, "the mutations are too weak or too strong to tell anything"


def test_mutations_of_a_config(tmp_path: Path, base: dict[str, Any], caplog, monkeypatch) -> None:
    caplog.set_level("ERROR")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # compile=true is quick then
    base = {**base, "steps": 1}
    endings = []
    for seed in range(COUNT):
        dice = random.Random(seed)
        config = copy.deepcopy(base)
        what = [mutate(config, dice, VALUES) for _ in range(dice.choice([1, 1, 2]))]
        try:
            endings.append(outcome(config, tmp_path / "out"))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {what}") from error
        finally:
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert 0.02 < endings.count("done") / COUNT < 0.7
