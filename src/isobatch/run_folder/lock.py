"""One writer for a run folder: on one machine, and on machines that share a file system.

RUN/.lock says who writes there. Three things tell a living writer from a dead one:

- the file is locked as long as the process lives (fcntl, which a forked child does not inherit); the kernel lets go of it,
  and so does an NFS server that knows of locks;
- on the same machine the process is looked up by number and start time, where the file system knows no locks;
- between machines the writer touches the file every BEAT_S seconds; one that has not for STALE_S, by the clock of the file
  system, is dead. A writer that finds another's name in the file (it was suspended, or cut off) ends at once.

A new attempt of the same elastic launch takes over from a machine that was lost without waiting: torchrun has ended the others.
"""

from __future__ import annotations

import json
import os
import platform
import stat
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isobatch.errors import ConfigError, printable
from isobatch.runtime.processes import started

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME, LARGEST = ".lock", 4096  # bytes of it that are read
BEAT_S = 10.0
STALE_S = 90.0  # a network file system may show a beat a minute late
SETTLE_S = 1.0  # after taking over without the kernel's help, for another that did the same to show
TICK_S = 0.5
_held: set[Path] = set()  # by this process: the kernel's lock is between processes


@dataclass(frozen=True)
class Owner:
    """Who writes: `boot` and `space` (the process namespace) say where `pid` and `began` mean anything."""

    host: str
    pid: int
    began: str | None
    boot: str
    space: str
    launch: str
    token: str

    @classmethod
    def this(cls) -> Owner:
        launch = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        return cls(platform.node(), os.getpid(), started(os.getpid()), _boot(), _space(),
                   "" if launch == "none" else launch, uuid.uuid4().hex)  # fmt: skip

    @classmethod
    def of(cls, data: Any) -> Owner | None:
        """From what a lock file says; None where it names nobody."""
        kinds = {key: type(value) for key, value in asdict(cls("", 0, "", "", "", "", "")).items()}
        if not isinstance(data, dict) or any(not isinstance(data.get(k), kind) for k, kind in kinds.items() if k != "began"):
            return None
        known: dict[str, Any] = {key: data.get(key) for key in kinds}
        return cls(**known)

    def beside(self, other: Owner) -> bool:
        """Whether both see the same processes."""
        return bool(self.boot) and (self.boot, self.space) == (other.boot, other.space)

    def alive(self) -> bool:
        """Whether it is still there, on this machine."""
        if self.began is not None or self.pid == os.getpid():
            return self.pid != os.getpid() and started(self.pid) == self.began
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except OSError:
            return True
        return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """RUN is this process's to write, inside the block.

    Raises:
        ConfigError: somebody else writes there, or nobody can.
    """
    path = run_dir.resolve() / NAME
    if path in _held:  # a job inside a job of this process
        yield
        return
    lock = _acquire(path)
    try:
        lock.become(Owner.this())
        _held.add(path)
        over = threading.Event()
        threading.Thread(target=lock.beat, args=(over,), daemon=True, name="lock").start()
        try:
            yield
        finally:
            over.set()
            _held.discard(path)
            if lock.in_place() and lock.owner() == lock.mine:
                with suppress(OSError):
                    path.unlink()
    finally:
        os.close(lock.number)


def _acquire(path: Path) -> Lock:
    """The lock file, open, with the kernel's lock on it where the file system has such."""
    while True:
        try:
            number = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
                             | getattr(os, "O_NONBLOCK", 0), 0o644)  # fmt: skip
        except OSError as error:
            raise _unusable(path, error.strerror) from None
        lock = Lock(path, number)
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise _unusable(path, "is no regular file")
        try:
            if fcntl is not None:
                fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock.by_kernel = True
        except (BlockingIOError, PermissionError):
            owner = lock.owner()
            os.close(number)
            raise _taken(path, owner) from None
        except OSError:  # this file system has no locks: what the file says decides
            pass
        if lock.in_place():
            return lock
        os.close(number)  # its owner has just removed it


class Lock:
    """A lock file of this process. It is read through its one descriptor: to close another would let the kernel's lock go."""

    def __init__(self, path: Path, number: int):
        self.path, self.number = path, number
        self.by_kernel = False
        self.mine: Owner | None = None

    def owner(self) -> Owner | None:
        with suppress(OSError, ValueError, RecursionError):
            return Owner.of(json.loads(os.pread(self.number, LARGEST, 0)))
        return None

    def in_place(self) -> bool:
        """Whether the file is still the one of that name."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self.number), self.path.stat())
        return False

    def become(self, mine: Owner) -> None:
        """Write `mine` into the file, after whoever is named there is known to be gone."""
        before = self.owner()
        elsewhere = before is not None and not before.beside(mine)
        if before is not None and not elsewhere and not self.by_kernel and before.alive():
            raise _taken(self.path, before)
        if before is not None and elsewhere and not (mine.launch and mine.launch == before.launch):
            self.outlive(before)
        try:
            os.ftruncate(self.number, 0)
            os.pwrite(self.number, (json.dumps(asdict(mine)) + "\n").encode(), 0)
            os.fsync(self.number)
        except OSError as error:
            raise _unusable(self.path, error.strerror) from None
        if elsewhere or not self.by_kernel:
            time.sleep(SETTLE_S)
        if not self.in_place() or self.owner() != mine:
            raise _taken(self.path, self.owner())
        self.mine = mine

    def outlive(self, owner: Owner) -> None:
        """Return when `owner`, on another machine, has not been heard of for STALE_S; by the file system's clock, as the beats.

        A time that lies ahead (a folder that was copied, a clock that was set) is waited for as long, and no longer.
        """
        beat, began = os.fstat(self.number).st_mtime_ns, time.monotonic()
        age = (_clock(self.path) - beat) / 1e9
        left = min(max(STALE_S - age, 0), STALE_S)
        if left:
            warn(f"{self.path.parent} is held by {owner}; it is taken over when nothing has been heard of it for {left:.0f} s")
        while time.monotonic() - began < left:
            time.sleep(min(TICK_S, left))
            if self.owner() != owner or self.path.stat().st_mtime_ns != beat:
                raise _taken(self.path, self.owner())

    def beat(self, over: threading.Event) -> None:
        """Say every BEAT_S that this process lives, and end it when another has taken its place."""
        while not over.wait(BEAT_S):
            owner = self.owner() if self.in_place() else None  # a folder that was deleted is told elsewhere
            if owner is not None and owner != self.mine and not over.is_set():
                warn(f"{self.path.parent} was taken over by {owner}; this process ends")
                os._exit(1)
            with suppress(OSError):
                os.utime(self.number if os.utime in os.supports_fd else self.path)


def warn(text: str) -> None:
    """Waits for nothing: this process may be about to end."""
    print(f"isobatch: {printable(text)}", file=sys.stderr, flush=True)


def _clock(path: Path) -> int:
    """What time it is where the folder lies, in nanoseconds."""
    probe = path.with_name(f"{NAME}.{os.getpid()}")
    try:
        probe.unlink(missing_ok=True)
        probe.touch()
        return probe.stat().st_mtime_ns
    except OSError:
        return time.time_ns()
    finally:
        with suppress(OSError):
            probe.unlink()


def _taken(path: Path, owner: Owner | None) -> ConfigError:
    who = owner or "another process, which is just starting or ending,"
    return ConfigError("hydra.run.dir", path.parent, f"{who} writes there",
                       "wait for it, or set another hydra.run.dir (hydra.sweep.dir)")  # fmt: skip


def _unusable(path: Path, problem: str | None) -> ConfigError:
    return ConfigError("hydra.run.dir", path.parent, f"cannot be written ({path.name}: {problem})",
                       "set hydra.run.dir (hydra.sweep.dir) to a folder that can")  # fmt: skip


def _boot() -> str:
    """One boot of one machine; empty where it cannot be told."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} {sys.platform}" if sys.platform != "linux" else ""


def _space() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
