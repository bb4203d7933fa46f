"""What the training process makes of signals."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import BASE, plain

from isobatch.launch import job, signals
from isobatch.launch.signals import STOP
from isobatch.runtime.distributed import Ranks
from isobatch.train import loop


@pytest.fixture(autouse=True)
def _nothing_is_left_requested() -> Iterator[None]:
    yield
    STOP.requested = 0


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the clock of the signals is ahead."""
    ahead = [0.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda now=time.monotonic: now() + ahead[0])
    return ahead


def test_the_second_request_stops_at_once_but_not_its_echo(later: list[float]) -> None:
    with STOP.installed(quiet=True):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert STOP.requested == signal.SIGTERM
        later[0] = 2 * signals.ECHO_S
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_sigterm_after_the_schedulers_warning_does_not_cost_the_checkpoint(later: list[float]) -> None:
    with STOP.installed(quiet=True):
        signal.raise_signal(signal.SIGUSR1)
        assert STOP.requested == signal.SIGUSR1
        later[0] = 100.0
        signal.raise_signal(signal.SIGTERM)
        assert STOP.requested == signal.SIGTERM
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_somebody_elses_sigusr1_is_left_alone() -> None:
    before = signal.signal(signal.SIGUSR1, mine := lambda number, frame: None)
    try:
        with STOP.installed(quiet=True):
            assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_warned_run_stops_with_a_checkpoint_and_the_signals_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = loop.train_step

    def warned(state: object, *args: object, **kwargs: object) -> object:
        if state.step == 2:
            signal.raise_signal(signal.SIGUSR1)
        return original(state, *args, **kwargs)

    monkeypatch.setattr(loop, "train_step", warned)
    outcome = job.execute(plain(*BASE, "steps=9", "epochs=null", "checkpoint=default"), tmp_path, Ranks())
    assert (outcome.kind, outcome.signum) == ("stopped", signal.SIGUSR1)
    assert (tmp_path / "checkpoints/last/state.pt").exists() and '"steps": 3' in (tmp_path / "summary.json").read_text()
