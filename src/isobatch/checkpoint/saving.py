"""Saves the checkpoints of one run: the training waits for a copy in memory, a thread does the rest."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from isobatch.checkpoint.best import Leaders
from isobatch.checkpoint.folder import STATE, WEIGHTS, CheckpointFolder, Damaged, HashedFile, fsync_folder, link_or_copy, verify
from isobatch.errors import JobFailed
from isobatch.resume.signature import Signature
from isobatch.run_folder import layout
from isobatch.runtime.dtensor import whole_tree

if TYPE_CHECKING:
    from isobatch.runtime.distributed import Ranks
    from isobatch.train.state import TrainState

log = logging.getLogger("isobatch")

ROUND_S = 0.5  # seconds that ranks wait for the one that writes before they ask again
SAVE_NOW = 1 << 16  # what `request` asks the ranks to agree on; above every signal number


class SavingRules(Protocol):
    """When to save, what to keep, and which evaluation is the best (Checkpoint, the options)."""

    @property
    def every(self) -> int | None: ...

    @property
    def every_minutes(self) -> float | None: ...

    @property
    def keep(self) -> int: ...

    @property
    def keep_best(self) -> int: ...

    def direction(self, metric: str) -> str | None: ...

    def followed(self, result: dict[str, float]) -> str | None: ...

    def better(self, best: dict[str, dict[str, float]], result: dict[str, float]) -> str | None: ...

    def improved(self, best: dict[str, dict[str, float]], result: dict[str, float], step: int) -> list[str]: ...


class Checkpointer:
    """All ranks call every method alike; the main rank writes, since the state is the same on all.

    A save that fails (disk full, folder gone) is one warning: training goes on and the checkpoint before stays. Only
    `wait`, at the end, turns it into a failure.

    Args:
        about: what is saved beside the training state: `config`, `plan`, `identity`.
        enabled: False = save nothing.
    """

    def __init__(self, options: SavingRules, run_dir: Path, ranks: Ranks, about: dict[str, Any], enabled: bool = True):
        self.options, self.ranks, self.about, self.enabled = options, ranks, about, enabled
        self.folder = CheckpointFolder(run_dir / layout.CHECKPOINTS)
        self.leaders = Leaders(options)
        self.allowed = True
        self.thread: threading.Thread | None = None
        self.failure: str | None = None  # why the latest save is not on disk
        self.saved_step: int | None = None
        self.saved_at = time.monotonic()
        self.existed = False
        self.latest: Any = None  # snapshot, whose memory the next one uses again
        self.inspect: Callable[[TrainState], None] | None = None  # looks at what is about to be saved; may raise

    def due(self, step: int) -> bool:
        """Whether `step` is one of every `checkpoint.every`."""
        return self.next_due(step) == step

    def next_due(self, step: int) -> int | None:
        """The first one of every `checkpoint.every` from `step` on; None: there is none."""
        every = self.options.every
        return step + -step % every if self.enabled and every is not None else None

    def request(self) -> int:
        """SAVE_NOW when `checkpoint.every_minutes` have passed by this rank's clock, else 0."""
        minutes = self.options.every_minutes
        over = self.enabled and minutes is not None and time.monotonic() - self.saved_at > 60 * minutes
        return SAVE_NOW if over and self.ranks.is_main else 0

    def forbid(self) -> None:
        """The state is damaged (not finite): keep what is on disk."""
        self.allowed = False

    def save(self, state: TrainState, is_best: bool = False) -> None:
        """Save `last` and `step-N`, and `best` too if `is_best`. Returns when the state is copied.

        One save is in flight at a time: the one before is waited for.
        """
        self.saved_at = time.monotonic()
        if not self.enabled or not self.allowed:
            return
        self.settle()
        if self.inspect is not None:
            self.inspect(state)
        tree = whole_tree(state.state_dict(), self.ranks.is_main)  # on all ranks: a sharded model gathers here
        if not self.ranks.is_main:
            return
        from isobatch.checkpoint.snapshot import Snapshot

        snapshot = Snapshot({**tree, **self.about, "format": layout.FORMAT}, self.latest)
        self.latest = snapshot
        names = ["last", "best"] if is_best else ["last"]
        # a daemon: the second Ctrl-C must not wait for a disk
        raw = is_best and state.better == "raw"  # what is best is what the file of weights holds
        kept = frozenset(self.leaders.steps)
        self.thread = threading.Thread(target=self._write, args=(snapshot, state.step, names, raw, kept), daemon=True)
        self.thread.start()

    def _write(self, snapshot: Any, step: int, names: list[str], raw: bool, kept: frozenset[int]) -> None:
        try:
            self._write_files(snapshot.ready(), step, names, raw, kept)
            self.failure, self.saved_step = None, step
        except Exception as error:  # whatever it is, it must not end the training
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
            self.failure = f"checkpoint of step {step} is not saved: {reason} ({self.folder.path})"
            stays = "no earlier one" if self.saved_step is None else f"the one of step {self.saved_step} stays"
            log.warning("%s; training goes on, %s", self.failure, stays)

    def _write_files(self, tree: dict[str, Any], step: int, names: list[str], raw: bool = False,
                     kept: frozenset[int] = frozenset()) -> None:  # fmt: skip
        import torch
        from safetensors.torch import save_file

        from isobatch.checkpoint.snapshot import broken

        if found := broken(tree):
            raise ValueError(f"{found} is not finite")
        if self.existed and not self.folder.path.exists():
            log.warning("%s was deleted while training; it is made anew", self.folder.path)
        part = self.folder.begin()
        self.existed = True
        files: dict[str, Any] = {}
        with HashedFile(part / STATE) as file:
            torch.save(tree, file)  # type: ignore[arg-type]  # it only writes
        files[STATE] = file.entry()
        weights = {name: tensor.contiguous() for name, tensor in ((None if raw else tree["ema"]) or tree["model"]).items()}
        signature = Signature.read(self.about.get("plan", {}))  # so that the file alone says what its outputs stand for
        save_file(weights, part / WEIGHTS, metadata={"format": "pt"} | (signature.metadata() if signature else {}))
        files[WEIGHTS] = hash_of(part / WEIGHTS)
        self.folder.publish(part, step, files, names)
        self.folder.finish(step, self.options.keep, kept)

    def join(self) -> None:
        """Return when no save is in flight; says nothing about how it ended."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def settle(self) -> None:
        """Return when no save is in flight, on all ranks together (a collective).

        In short rounds, so that a slow disk does not use up the time that a collective may take.
        """
        while True:
            if self.thread is not None:
                self.thread.join(ROUND_S)
            if not self.ranks.agree(int(self.thread is not None and self.thread.is_alive())):
                break
        self.thread = None

    def wait(self) -> None:
        """Return when everything saved is complete on disk.

        Raises:
            JobFailed: on all ranks, if the latest state could not be saved.
        """
        self.settle()
        failure: str | None = self.ranks.broadcast_object(self.failure)
        if failure:
            raise JobFailed(failure)

    def adopt_best(self, best: Path, steps: set[Any]) -> None:
        """Bring another run's `best`, of one of `steps`, into this folder: what this run has to beat."""
        if not self.enabled or not self.ranks.is_main or (self.folder.path / "best").exists():
            return
        try:
            if verify(best).step not in steps:
                return
            link_or_copy(best, self.folder.tmp / "best")
            self.folder.recover()
            fsync_folder(self.folder.path)
            self.folder.tmp.rmdir()
        except Damaged as problem:
            log.warning("%s is not taken along: %s", best, problem)
        except OSError as error:
            log.warning("%s could not be copied: %s", best, error.strerror)


def hash_of(path: Path) -> dict[str, Any]:
    """The manifest entry of a file that was written by somebody else, after forcing it to the disk."""
    import hashlib
    import os

    with path.open("rb") as file:
        os.fsync(file.fileno())
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
