"""What only a real device can show, small: `pytest -m gpu` (benchmarks/gpu.py begins with it)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs import apart, job, on_cpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
FULL = "precision.tf32=false"


@pytest.mark.parametrize(("words", "limit"), [
    (FULL, 1e-3), (f"{FULL} ema=ema ema.decay=0.5 max_grad_norm=0.5 augment=mixup", 1e-3),
    (f"{FULL} data.num_workers=1", 1e-3), ("precision=bf16", 3e-2), ("precision=amp precision.dtype=float16", 3e-2),
])  # fmt: skip
def test_it_trains_as_a_cpu_does(tmp_path: Path, words: str, limit: float) -> None:
    """Without dropout, whose numbers are each device's own."""
    host = " ".join(word for word in words.split() if not word.startswith("precision"))
    one = on_cpu(tmp_path / "cpu", job("device=cpu", *host.split(), quiet=True))
    other = on_cpu(tmp_path / "gpu", job(*words.split(), quiet=True))
    assert (one.flat - other.flat).abs().max() < limit


@pytest.mark.parametrize("words", ["", "reduction.method=bin64", "precision=bf16"])
def test_exact_has_the_bits_of_any_micro_batch_and_of_a_run_that_went_on(tmp_path: Path, words: str) -> None:
    base = "reduction=exact", "batch.shard=7", *words.split(), "checkpoint=default", "checkpoint.every=2", "deterministic=true"
    one = on_cpu(tmp_path / "one", job(*base, "batch.micro=7"))
    assert apart(one, on_cpu(tmp_path / "other", job(*base, "batch.micro=26", "threads=2"))) == 0
    on_cpu(tmp_path / "half", job(*base, "batch.micro=7", "steps=2"))
    rest = on_cpu(tmp_path / "rest", job(*base, "batch.micro=14", f"resume={tmp_path / 'half'}"))
    assert rest.summary["weights_sha256"] == one.summary["weights_sha256"]


def test_recorded_steps_are_those_that_are_run(tmp_path: Path) -> None:
    words = FULL, "steps=8", "eval_every=4", "optimizer=adamw", "optimizer.lr=0.002"
    one, other = (on_cpu(tmp_path / kind, job(*words, f"cuda_graph={kind}")) for kind in ("false", "true"))
    assert apart(one, other) < 5e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_train_as_one(tmp_path: Path) -> None:
    one = on_cpu(tmp_path / "one", job(FULL, quiet=True))
    assert apart(one, on_cpu(tmp_path / "two", job(FULL, "parallel=dp", quiet=True))) < 1e-3
