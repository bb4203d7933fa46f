"""What a restart finds again: the run folder of the launch, and the cut of an attempt that left no checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from harness import BASE, plain, train

from isobatch import config as configuration
from isobatch.batch_plan import Batch, resolve_batch
from isobatch.launch import last_folder
from isobatch.resume.start import Resume
from isobatch.runtime.distributed import Ranks

BATCH = (*BASE, "data=synthetic", "data.image_size=4", "batch.effective=12", "batch.shard=null", "epochs=null",
         "steps=2")  # fmt: skip


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one/../two")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"isobatch-{os.getuid()}"


def test_the_folder_is_remembered_per_agent_and_dead_agents_are_forgotten(under_torchrun: Path) -> None:
    assert last_folder.recall() == {}
    last_folder.remember({"outputs": "outputs/a"})
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    stale = under_torchrun / f"{gone.stdout.strip()}-12-id.json"
    stale.write_text("{}")
    last_folder.remember({"multirun": "multirun/b"})
    assert last_folder.recall() == {"outputs": "outputs/a", "multirun": "multirun/b"}
    assert not stale.exists()
    (kept,) = under_torchrun.iterdir()
    assert kept.name.startswith(f"{os.getppid()}-")


def test_a_folder_that_others_can_write_to_chooses_nothing(under_torchrun: Path) -> None:
    last_folder.remember({"outputs": "outputs/a"})
    under_torchrun.chmod(0o777)
    assert last_folder.recall() == {}


def test_without_torchrun_nothing_is_kept(under_torchrun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    last_folder.remember({"outputs": "outputs/a"})
    assert not under_torchrun.exists()


def begun(folder: Path, replicas: int, *overrides: str) -> Batch:
    effective, micro, accumulation, shard = Resume(configuration.load(plain(*overrides)), folder, Ranks()).batch()
    return resolve_batch(effective, micro, accumulation, replicas, shard)


def test_an_attempt_without_a_checkpoint_keeps_its_cut_on_another_world(tmp_path: Path) -> None:
    train(tmp_path / "run", *BATCH, "checkpoint=none", "parallel=dp", "parallel.replicas=3")
    wanted = json.loads((tmp_path / "run/plan.json").read_text())["micro_batch"]
    assert wanted == 4  # of three replicas
    assert begun(tmp_path / "run", 1, *BATCH).micro == 4
    assert begun(tmp_path / "run", 2, *BATCH).accumulation_steps == 2


@pytest.mark.parametrize(
    "changed", [["batch.effective=24"], ["seed=5"], ["accumulation=2"], ["checkpoint.resume=never"], ["batch.micro=6"]]
)
def test_another_run_in_the_same_folder_is_cut_anew(tmp_path: Path, changed: list[str]) -> None:
    train(tmp_path / "run", *BATCH, "checkpoint=none", "parallel=dp", "parallel.replicas=3")
    assert begun(tmp_path / "run", 1, *BATCH, *changed).micro != 4


def test_a_damaged_plan_is_as_none(tmp_path: Path) -> None:
    train(tmp_path / "run", *BATCH, "checkpoint=none", "parallel=dp", "parallel.replicas=3")
    (tmp_path / "run/plan.json").write_text('{"micro_batch": "many"}')
    assert begun(tmp_path / "run", 1, *BATCH).micro == 12
