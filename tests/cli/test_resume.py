"""`resume=RUN` as a person types it: stops by a signal, other plans, refusals, the same folder again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm

TRAIN = str(Path(__file__).parents[2] / "train.py")
SETTING = ("model=mlp", "model.width=8", "model.depth=1", "logger=none", "threads=1", "optimizer=sgd", "epochs=null",
           "log_every=1", "reduction=exact", "batch.micro=24", "data.num_workers=0")  # fmt: skip
LIMIT_S = 200  # seconds that one command may take


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    return warm.Popen([sys.executable, TRAIN, *words], cwd=cwd, text=True, stdout=subprocess.PIPE,
                      stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip


def isobatch(*words: str, cwd: Path) -> tuple[int, str]:
    process = start(*words, cwd=cwd)
    try:
        text = process.communicate(timeout=LIMIT_S)[0]
    finally:
        process.kill()
    return process.returncode, text


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.timeout(600)
def test_a_run_stopped_by_sigterm_goes_on_with_its_own_settings_on_two_ranks(tmp_path: Path) -> None:
    many = 100_000
    process = start(*SETTING, f"steps={many}", "hydra.run.dir=run", cwd=tmp_path)
    try:
        end = time.monotonic() + LIMIT_S
        while not (tmp_path / "run/metrics.jsonl").exists() and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        text = process.communicate(timeout=LIMIT_S)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 143, text
    stopped = summary(tmp_path / "run")
    assert stopped["state"] == "stopped" and 0 < stopped["steps"] < many

    # the same run to its end on other hardware: from the checkpoint on two ranks, and undisturbed on one
    steps = stopped["steps"] + 3
    words = ("resume=run", "scheduler=constant", f"steps={steps}", "parallel=ddp", "parallel.nproc=2", "hydra.run.dir=two")
    code, text = isobatch(*words, cwd=tmp_path)
    assert code == 2 and "scheduler.name=constant: " in text and "was trained with scheduler.name=cosine" in text
    code, text = isobatch(*(w for w in words if w != "scheduler=constant"), cwd=tmp_path)
    assert code == 0, text
    assert f"goes on from {tmp_path}/run/checkpoints/last, step {stopped['steps']}" in text.replace("\n", "")
    done = summary(tmp_path / "two")
    assert (done["steps"], done["plan"]["world_size"], done["plan"]["num_shards"]) == (steps, 2, 6)
    rows = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    trained = [
        row["step"] for row in rows if "train/loss" in row
    ]  # the stop may also have come before an evaluation that was due
    assert trained == [steps - 2, steps - 1, steps]
