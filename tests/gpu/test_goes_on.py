"""A run of one device goes on on another kind or number of devices, and its model is used on any."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Outcome, job, on_cpu, on_gpus
from pretended import strictly

from isobatch import run
from isobatch.runtime.distributed import Ranks

pytestmark = pytest.mark.gpu_pretended
SAVING = "checkpoint=default", "checkpoint.every=3", "eval_every=3"


def apart(whole: Outcome, rest: Outcome) -> float:
    """Largest difference of a weight after the steps that both made."""
    return (whole.flat[-len(rest.flat) :] - rest.flat).abs().max().item()


@pytest.mark.parametrize(("words", "limit"), [
    ("precision=fp32", 2e-6),
    pytest.param("precision=amp precision.dtype=float16", 2e-2, marks=pytest.mark.slow),
    pytest.param("precision=O2 ema=ema", 2e-2, marks=pytest.mark.slow),
    pytest.param("optimizer=adamw optimizer.lr=0.002 augment=mixup", 5e-3, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_run_goes_on_anywhere(tmp_path: Path, words: str, limit: float) -> None:
    whole = on_cpu(tmp_path / "whole", job(*words.split(), *SAVING, "steps=6"))
    on_gpus(tmp_path / "gpu", job(*words.split(), *SAVING, "steps=3"))
    more = *words.split(), *SAVING, "steps=6", f"resume={tmp_path / 'gpu'}"
    two = on_gpus(tmp_path / "two", job(*more, "parallel=dp"), 2)
    back = on_cpu(tmp_path / "back", job(*more))
    forth = on_gpus(tmp_path / "forth", job(*words.split(), *SAVING, "steps=9", f"resume={tmp_path / 'back'}"))
    assert len(two.flat) == len(back.flat) == len(forth.flat) == 3
    assert apart(whole, two) <= limit and apart(whole, back) <= limit
    assert forth.rows[-1]["step"] == 9 and (forth.flat[0] - whole.flat[-1]).abs().max() < 0.1


@pytest.mark.parametrize("task", ["predict", pytest.param("export", marks=pytest.mark.slow)])
def test_its_model_is_used_there_as_on_a_cpu(tmp_path: Path, task: str) -> None:
    on_gpus(tmp_path / "run", job(*SAVING, "steps=3", "model=mlp", probe=False))
    made = job(f"task={task}", f"resume={tmp_path / 'run'}", probe=False)
    run.run_job(made, tmp_path / "cpu", Ranks())
    with strictly():
        run.run_job(made, tmp_path / "gpu", Ranks())
    names = {path.name for path in (tmp_path / "cpu").rglob("*") if path.is_file()}
    assert names == {path.name for path in (tmp_path / "gpu").rglob("*") if path.is_file()}
    tables = list((tmp_path / "cpu").rglob("*.csv"))
    assert names and (tables or task == "export")
    for table in tables:
        assert (tmp_path / "gpu" / table.relative_to(tmp_path / "cpu")).read_text() == table.read_text()
