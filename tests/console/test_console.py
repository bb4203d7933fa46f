"""The console: what is said where, by whom, and what it costs."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isobatch.console import Console, make_console
from isobatch.console import plain as plain_module
from isobatch.console.live import LiveConsole
from isobatch.console.plain import PlainConsole
from isobatch.console.text import Remaining, duration, facts, number

VIEW = {"effective batch": "48 = 3 shards", "parallel": "one process on cpu"}
LOOK = ["wandb sync /somewhere/wandb/offline-run-1"]


class Terminal(io.StringIO):
    """Takes what would go to a terminal."""

    def isatty(self) -> bool:
        return True


def row(step: int) -> dict[str, Any]:
    return {"step": step, "epoch": (step - 1) // 10, "samples": 48 * step, "train/loss": 1 / step, "train/lr": 0.002,
            "train/loss_scale": 65536.0, "train/skipped_steps": 0, "perf/samples_per_s": 1234.5}  # fmt: skip


def evaluation(step: int) -> dict[str, Any]:
    return {"step": step, "samples": 48 * step, "eval/loss": 0.25, "eval/accuracy": 0.975, "eval/samples": 359}


def summary(state: str = "completed") -> dict[str, Any]:
    return {"state": state, "steps": 20, "updates": 19, "skipped_steps": 1, "samples": 960, "best": {"eval/accuracy": 0.98},
            "final": {"eval/loss": 0.25, "eval/accuracy": 0.975, "train/loss": "nan"}, "weights_sha256": "ab" * 32,
            "time": {"total_s": 70.4, "train_s": 61.0, "first_step_s": 2.0}, "perf": {"samples_per_s": 1234.5},
            "ranks": [{"rank": 0, "peak_memory_mb": 100.0}, {"rank": 1, "peak_memory_mb": 200.0}]}  # fmt: skip


def a_run(console: Console, state: str = "completed") -> None:
    console.plan(VIEW, ["a note"])
    console.begin(0)
    for step in range(1, 21):
        console.step(row(step))
        console.advance(step, (step - 1) // 10)
        if step == 10:
            logging.getLogger("isobatch").warning("a warning in between")
            console.evaluation(evaluation(step), ["eval/accuracy"])
    console.result(summary(state), "/runs/here", LOOK)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """train.log, as launch sets it up: a handler for the file and one for standard output."""
    root = logging.getLogger()
    before = root.handlers, root.level
    file = logging.FileHandler(tmp_path / "train.log")
    root.handlers, root.level = [file, logging.StreamHandler(sys.stdout)], logging.INFO
    yield tmp_path / "train.log"
    root.handlers, root.level = before
    file.close()


def test_lines_where_there_is_no_terminal(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console(True, 20, 10)
    assert isinstance(console, PlainConsole)
    logging.getLogger().handlers[1].setStream(sys.stdout)  # type: ignore[attr-defined]  # pytest's, put in place since
    a_run(console)
    out = capsys.readouterr().out
    assert out == log.read_text()  # everything in both, nothing twice
    assert "effective batch  48 = 3 shards" in out and "note: a note" in out
    assert out.count("\nstep ") == 2, "the first and the last; nobody reads 20 lines in a second"
    assert "step  1/20, epoch 1/2, loss 1.0000, lr 0.002, scale 65,536, 1,234 samples/s" in out
    assert "evaluation at step 10: loss 0.2500, accuracy 97.50 % (best accuracy)" in out
    for words in ("97.50 %, best 98.00 %", "19, 1 skipped, 960 samples", "trained 1:01 of 1:10", "100 to 200 MB per rank",
                  "sha256 abababab", "/runs/here", "look at it: wandb sync /somewhere"):  # fmt: skip
        assert words in out


def test_progress_lines_keep_their_distance(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = iter(range(100))
    monkeypatch.setattr(plain_module.time, "monotonic", lambda: float(next(now)) + 1000)
    console = PlainConsole(100, 10)
    for step in range(1, 12):
        console.step(row(step))
    steps = [int(line.split()[1].split("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert steps == [1, 6, 11]


def test_a_terminal_gets_frames_and_a_bar(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    handler: Any = logging.getLogger().handlers[1]
    handler.setStream(terminal)
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "120"), ("LINES", "40")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", terminal)
    console = make_console(True, 20, 10)
    assert isinstance(console, LiveConsole)
    a_run(console)
    assert sys.stdout is terminal and handler.stream is terminal  # put back
    shown, written = terminal.getvalue(), log.read_text()
    for words in ("╭─", "a note", "━", "a warning in between", "97.50 %", "98.00 %", "look at it: wandb sync", "\x1b[?25h"):
        assert words in shown
    assert shown.count("a warning in between") == 1 == written.count("a warning in between")
    assert "\x1b" not in written and "effective batch  48 = 3 shards" in written and "evaluation at step 10" in written
    assert written.count("completed") == 1


def test_a_bar_in_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    for columns in (20, 60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        console = LiveConsole(20, 10)
        console.advance(13, 1)
        console.row = row(13)
        text = console.__rich__()
        assert "epoch 2/2" in text.plain and "━" in text.plain and "loss 0.0769" in text.plain
        assert text.cell_len <= columns or columns == 20  # there rich cuts it, with an ellipsis
        assert ("13/20" in text.plain) == ("lr 0.002" in text.plain) == (columns >= 80)


def test_a_stopped_job_of_a_sweep_names_the_sweep_to_go_on_with(tmp_path: Path) -> None:
    """With resume= every job of the sweep would start from this one's checkpoint."""
    record = tmp_path / "sweep" / "1" / ".hydra" / "hydra.yaml"
    record.parent.mkdir(parents=True)
    record.write_text("hydra: {mode: MULTIRUN, sweep: {subdir: '${hydra.job.num}'}}")
    said = dict(facts(summary("stopped"), str(tmp_path / "sweep" / "1")))["go on with"]
    assert said.startswith("the same command and hydra.sweep.dir=") and said.endswith("sweep")


@pytest.mark.parametrize("kind", [PlainConsole, LiveConsole])
def test_weights_that_are_asked_for_are_shown_with_the_evaluation(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    console = kind(20, 10)
    console.evaluation({**evaluation(10), "weights": [0.857581, -0.79]})
    assert "0.857581 -0.790000" in capsys.readouterr().out


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_endings(state: str, capsys: pytest.CaptureFixture[str]) -> None:
    PlainConsole(20, 10).result(summary(state), "/runs/here", LOOK)
    out = capsys.readouterr().out
    assert ("resume=/runs/here" in out) == (state == "stopped") and bool(out) == (state == "stopped")


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    a_run(make_console(False, 20, 10))
    assert "plan" not in capsys.readouterr().out


def test_a_step_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    for console in (PlainConsole(10**6, 100), LiveConsole(10**6, 100)):
        calls: list[str] = []
        sys.setprofile(lambda frame, event, argument, calls=calls: calls.append(event) if "call" in event else None)
        try:
            for step in range(1000):
                console.advance(step, 0)
        finally:
            sys.setprofile(None)
        assert len(calls) < 1100  # itself alone, a step: no clock is read and nothing is formatted


def test_numbers_a_person_reads() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3599, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]
    assert [number(x) for x in (0.0, 0.1234, 12.345, 1e-5, 123456.0, 1234)] == [
        "0", "0.1234", "12.3", "1.00e-05", "1.23e+05", "1,234"]  # fmt: skip
    pace = Remaining(100)
    pace.begin(40, 10.0)
    assert pace.left(41, 11.0) == "" and pace.left(50, 30.0) == "1:40 left"
