"""A run that is killed at any of its writes and goes on has every row once, in metrics.jsonl and in the logger's run.

A kill is an exception at the write, after which nothing is written any more. The logger is one that can only be added to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoint_tools import train_and_stop
from harness import BASE, train

from isobatch.checkpoint.folder import CheckpointFolder
from isobatch.checkpoint.saving import Checkpointer
from isobatch.logger import Logger
from isobatch.logger.csv_rows import CsvLogger
from isobatch.logger.protocol import RunInfo
from isobatch.run_folder.files import RunFiles
from isobatch.run_folder.rows import name_of

WORDS = (*BASE, "epochs=null", "steps=6", "eval_every=3", "checkpoint.every=2", "log_every=1", "batch.effective=4",
         "batch.micro=4", "data=random_matrix", "loss=mse")  # fmt: skip


class Killed(BaseException):
    pass


class Machine:
    """Counts writes, and ends before the one with the number `last`, or of that name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Path):
        self.patch, self.run, self.history = monkeypatch, run, list[tuple[int, str]]()
        self.count, self.last, self.dead = 0, None, False
        self.logged: Any = frozenset()
        self.files: RunFiles | None = None
        self._writes(RunFiles, "config", "plan", "resume_metrics", "row", "summary")
        self._writes(CheckpointFolder, "begin", "publish", "finish")
        monkeypatch.setattr(Logger, "start", lambda _, plan, run_id=None, samples=0, logged=(): setattr(self, "logged", logged))
        monkeypatch.setattr(Logger, "log", self._write("log", lambda _, row: self._log(row)))
        write, save = Checkpointer._write, Checkpointer.save
        monkeypatch.setattr(Checkpointer, "_write", lambda own, *rest: quietly(Killed, write, own, *rest))
        monkeypatch.setattr(Checkpointer, "save", lambda own, *rest: (save(own, *rest), own.join(), self._alive()))

    def _log(self, row: dict[str, Any]) -> None:
        if name_of(row) not in self.logged:
            self.history.append(name_of(row))

    def _alive(self) -> None:
        if self.dead:
            raise Killed

    def _write(self, name: str, write: Callable[..., Any]) -> Callable[..., Any]:
        def counted(own: Any, *given: Any, **named: Any) -> Any:
            self.files = own if isinstance(own, RunFiles) else self.files
            self.dead = self.dead or self.last in (self.count, name)
            self._alive()
            self.count += 1
            return write(own, *given, **named)

        return counted

    def _writes(self, owner: type, *names: str) -> None:
        for name in names:
            self.patch.setattr(owner, name, self._write(name, getattr(owner, name)))

    def train(self, *words: str, last: int | str | None = None) -> bool:
        """Train until the write `last`; returns whether it came to that."""
        self.count, self.last, self.dead = 0, last, False
        try:
            train(self.run, *WORDS, f"resume={self.run}" if (self.run / "checkpoints/last").exists() else "resume=null", *words)
        except Killed:
            assert self.files is not None
            self.files.close()  # as the system does
        return self.dead

    def rows(self) -> list[tuple[int, str]]:
        return [name_of(json.loads(line)) for line in (self.run / "metrics.jsonl").read_text().splitlines()]


def quietly(error: type[BaseException], do: Callable[..., Any], *given: Any) -> None:
    with suppress(error):
        do(*given)


NAMES = [(4 * step, kind) for step in range(1, 7) for kind in (("train", "eval") if step % 3 == 0 else ("train",))]


def check(machine: Machine, kills: int) -> None:
    assert machine.rows() == NAMES
    assert len(set(machine.history)) == len(machine.history), "twice"
    # a row is in the file before the logger gets it, which may lack it: a kill between the two
    assert len(set(NAMES) - set(machine.history)) <= kills


def stopped(monkeypatch: pytest.MonkeyPatch, run: Path) -> Machine:
    """A run that a signal has stopped after step 3, whose evaluation is owed."""
    machine = Machine(monkeypatch, run)
    train_and_stop(run, 3, *WORDS)
    assert machine.rows() == NAMES[:3]
    return machine


def test_an_owed_evaluation_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed twice: after the evaluation and before a checkpoint that knows of it, then before it is made again."""
    machine = stopped(monkeypatch, tmp_path / "run")
    assert machine.train(last="begin") and machine.rows() == NAMES[:4] and machine.history == NAMES[:4]
    assert machine.train(last="row") and machine.rows() == NAMES[:3], "it is owed again, and the logger has it"
    machine.train()
    check(machine, 0)


@pytest.mark.slow
@pytest.mark.parametrize("again", [None, 6])
def test_killed_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: int | None) -> None:
    for begin in ("new", "stopped"):
        last, killed = 0, True
        while killed:
            run = tmp_path / f"{begin}{last}"
            with monkeypatch.context() as patch:
                machine = stopped(patch, run) if begin == "stopped" else Machine(patch, run)
                killed = machine.train(last=last)
                if killed and again is not None:
                    machine.train(last=again)
                if not (run / "checkpoints/last").exists():
                    machine.history.clear()  # a run without a checkpoint is a new one to a logger
                machine.train()
                check(machine, 2 if again else 1)
            last += 1
        assert last > 20


def test_a_table_of_rows_has_an_owed_evaluation_once(tmp_path: Path) -> None:
    def logger() -> CsvLogger:
        return CsvLogger(RunInfo(tmp_path, {}))

    rows = [{"samples": 4, "train/loss": 1.0}, {"samples": 4, "eval/loss": 2.0}, {"samples": 8, "train/loss": 0.5}]
    first, second = logger(), logger()
    first.start({})
    for row in rows:
        first.log(row)
    first.finish({}, 1)
    second.start({}, samples=4, logged={(4, "eval"), (8, "train")})
    for row in rows[1:]:
        second.log(row)
    second.finish({}, 0)
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["samples,train/loss,eval/loss", "4,1.0,", "4,,2.0", "8,0.5,"]
