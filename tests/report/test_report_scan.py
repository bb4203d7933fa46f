"""The fast pass over metrics.jsonl finds what reading every line as JSON finds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from isobatch.report.scan import Scan


def plain(path: Path) -> tuple[list[int], list[float], int]:
    """(steps, losses, number of evaluations) by json alone; a step that comes again drops what is from there on."""
    rows: dict[int, float] = {}
    evals: list[int] = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "train/loss" in row:
            if rows and row["step"] <= max(rows):
                rows = {step: loss for step, loss in rows.items() if step < row["step"]}
                evals = [step for step in evals if step < row["step"]]
            rows[row["step"]] = row["train/loss"]
        if "eval/accuracy" in row:
            evals.append(row["step"])
    return list(rows), list(rows.values()), len(evals)


@pytest.mark.parametrize("seed", range(6))
def test_fast_and_plain_reading_agree(tmp_path: Path, seed: int) -> None:
    """Several blocks of 128 KiB with resumes, changed distances, evaluations and half-written lines."""
    rng = random.Random(seed)
    lines, step, stride = [], 0, 1
    for _ in range(3000):
        step += stride
        row = {"step": step, "update": step, "train/loss": rng.random() - 0.5, "train/lr": 1e-3, "pad": "x" * 60}
        lines.append(json.dumps(row))
        if rng.random() < 0.02:
            lines.append(json.dumps({"step": step, "eval/accuracy": rng.random()}))
        if rng.random() < 0.002:
            step = max(0, step - rng.randrange(1, 40))  # killed and resumed from a checkpoint
        if rng.random() < 0.001:
            stride = rng.choice([1, 2, 5])
        if seed % 2 and rng.random() < 0.001:
            lines.append(lines[-1][: rng.randrange(5, 60)])
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines) + ("\n" if seed % 3 else ""))
    assert path.stat().st_size > 3 * (1 << 17)
    with path.open("rb") as file:
        scan = Scan(file)
        assert (list(scan.steps), list(scan.losses), len(scan.evals)) == plain(path)
        for step, offset in list(zip(scan.steps, scan.offsets, strict=True))[::97]:
            file.seek(offset)
            assert json.loads(file.readline())["step"] == step
