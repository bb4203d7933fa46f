"""Rows of logged steps: read from a device one logged step late, and whole wherever the run stands still or ends."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import rows, train
from jobs import apart, job, on_cpu, on_gpus
from pretended import pretend

from isobatch.errors import JobFailed, Stopped
from isobatch.launch.signals import STOP

pytestmark = pytest.mark.gpu_pretended
LONG = "steps=6", "eval_every=6", "max_grad_norm=1"


def test_logging_waits_for_nothing_and_says_the_same(tmp_path: Path) -> None:
    often = on_gpus(tmp_path / "often", job(*LONG))
    seldom = on_gpus(tmp_path / "seldom", job(*LONG, "log_every=1000"))
    assert often.machine is not None and seldom.machine is not None
    assert often.machine.syncs.total() == seldom.machine.syncs.total(), (often.machine.syncs, seldom.machine.syncs)
    assert [row["step"] for row in often.rows] == [1, 2, 3, 4, 5, 6, 6]
    assert apart(on_cpu(tmp_path / "cpu", job(*LONG)), often) < 1e-6


def test_a_loss_that_is_not_finite_ends_the_run_before_anything_is_saved(tmp_path: Path) -> None:
    """Seen at the next logged step, or before a save; told is the step where it began."""

    def poison(state: Any, parts: Any, data: Any) -> None:
        seen.append(state.step)
        if state.step == 2:  # the third step: its gradients were of a good loss, the next one's are not
            with torch.no_grad():
                state.parameters[0].mul_(torch.nan)

    for every, last in ((5, 4), (4, 3)):
        seen: list[int] = []
        folder = tmp_path / f"{every}"
        with pretend(), pytest.raises(JobFailed, match=r"train/loss is nan at step 4 on rank 0 \(samples [\d, .]+\)"):
            train(folder, made=job(*LONG, "checkpoint=default", f"checkpoint.every={every}"), observe=poison)
        assert rows(folder, "step") == [1, 2, 3] and seen[-1] == last
        assert not list(folder.glob("checkpoints/*"))


@pytest.mark.parametrize("how", ["a stop", "an error"])
def test_what_was_logged_before_an_end_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(STOP, "requested", 0)

    def end(state: Any, parts: Any, data: Any) -> None:
        if state.step == 3 and how == "a stop":
            STOP.requested = signal.SIGTERM
        elif state.step == 3:
            machine.wait_all("a test")  # time goes by, and the numbers of step 3 arrive
            raise KeyError("something of the user's")

    with pretend() as machine, pytest.raises(Stopped if how == "a stop" else KeyError):
        train(tmp_path, made=job(*LONG), observe=end)
    assert rows(tmp_path, "train/loss") and rows(tmp_path, "step") == ([1, 2, 3, 4] if how == "a stop" else [1, 2, 3])
    assert all(isinstance(loss, float) for loss in rows(tmp_path, "train/loss"))
