"""Workers killed at random moments, and the training is the one that nobody disturbed."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

import pytest
from chaos import Launch, assert_same_training, kill, the_run, undisturbed, until

MOMENTS = ("training", "saving", "starting")
LIMIT_S = 300  # for anything that a busy machine may take long for


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kill_in_the_middle_of_a_save_loses_nothing(tmp_path: Path) -> None:
    disturb(tmp_path, ["saving"], steps=40, step_s=0.04)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thirty_kills_lose_nothing(tmp_path: Path) -> None:
    draw = random.Random(6)
    disturb(tmp_path, draw.choices(MOMENTS, (12, 12, 6), k=30), steps=500, step_s=0.06)


def disturb(cwd: Path, moments: list[str], steps: int, step_s: float, nproc: int = 2) -> None:
    """Train under torchrun, kill a worker at each of `moments`, and compare with the training that nobody disturbed."""
    draw = random.Random(len(moments))
    batch, recovery = [f"steps={steps}", "batch.micro=4", "batch.shard=null"], []
    reference = undisturbed(cwd, *batch)
    launch = Launch(cwd, [f"--nproc_per_node={nproc}", f"--max-restarts={len(moments)}"], batch, step_s=step_s)
    try:
        for moment in moments:
            pids = until(lambda: len(found := launch.workers()) == nproc and found, LIMIT_S, launch)
            victim = draw.choice(pids)
            if moment == "starting":
                time.sleep(draw.uniform(0, 3))
            else:
                until(launch.training, LIMIT_S, launch)
                time.sleep(draw.uniform(0, 0.5))
            if moment == "saving":
                victim, work = pids[0], the_run(cwd) / "checkpoints/tmp/new"  # the rank that writes
                until(work.exists, LIMIT_S, launch, 0.002)
                time.sleep(draw.uniform(0, 0.15))
            assert launch.process.poll() is None, f"over before all kills:\n{launch.tail()}"
            kill(victim)
            killed = time.monotonic()
            until(partial(launch.lost, pids), LIMIT_S, launch, 0.02)
            gone = time.monotonic()
            if moment != "starting":
                until(launch.training, LIMIT_S, launch, 0.02)
                recovery.append((gone - killed, time.monotonic() - killed))
        assert launch.wait(2 * LIMIT_S) == 0, launch.tail()
    finally:
        launch.end()
    assert_same_training(the_run(cwd), reference)
    shown = " ".join(f"{others:.1f}/{step:.1f}" for others, step in recovery)
    print("seconds from a kill to the end of the other ranks / to the first step done by new ones:", shown)
