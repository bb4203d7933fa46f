"""benchmarks/gpu_ladder.py at a small size: it is run on rented machines, where there is no time to debug it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from isobatch import hydra_patches

PATH = Path(__file__).parents[2] / "benchmarks" / "gpu_ladder.py"


def test_the_ladder_measures_every_level_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("gpu_ladder", PATH)
    assert spec is not None and spec.loader is not None
    ladder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ladder)
    out = tmp_path / "ladder"
    with hydra_patches.active():  # the ladder leaves them in force
        ladder.main(["--out", str(out), "--small", "--steps", "4", "--levels", "fp32,bf16_pure,O3", "--compiled", ""])
    levels = json.loads((out / "ladder.json").read_text())["levels"]
    assert list(levels) == ["fp32", "bf16_pure", "O3"]
    assert all(len(found["losses"]) == 4 and found["images/s"] > 0 and found["peak MB"] > 0 for found in levels.values())
    assert levels["bf16_pure"]["dtypes"] == {
        "weights": "bfloat16", "batch norm": "float32", "updated": "float32", "autocast": "off", "loss scale": "none",
        "checkpoint": "float32",
    }  # fmt: skip
    assert levels["O3"]["dtypes"]["checkpoint"] == "float16"
    assert ladder.apart(levels["bf16_pure"]["losses"], levels["fp32"]["losses"], 2) < 0.1
    assert "| O3 |" in capsys.readouterr().out
    with hydra_patches.active():  # the ladder leaves them in force
        ladder.main(["--out", str(tmp_path / "late"), "--small", "--seconds", "-1", "--levels", "fp32", "--compiled", ""])
    assert "left out" in (tmp_path / "late" / "ladder.md").read_text()
