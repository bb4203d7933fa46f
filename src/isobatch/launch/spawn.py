"""A job on processes of our own: `parallel.nproc=3` without torchrun.

The launching process runs Hydra, imports no torch and touches no device. The ranks are forked from a fork server that
has imported torch once, so that a sweep pays the import once and a crashed job cannot harm the next one. They meet
through a file, so no port can be taken.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from isobatch.console import streams
from isobatch.errors import Stopped
from isobatch.launch.job import execute, log_to
from isobatch.launch.outcome import Outcome, RunFolder, cause, hung
from isobatch.launch.signals import STOP
from isobatch.runtime.distributed import Ranks

MEETING, LOCK = "isobatch-ranks-", "in-use"
GONE_S = 2.0  # for the ranks beside one that is gone without a word: what they say follows from that
PEERS_S = 10.0  # for the ranks that did not fail: to notice, and to close what they had open
TICK_S = 0.2  # how soon a request to stop is passed on


def run_ranks(plain: dict[str, Any], run_dir: Path, count: int, environ: dict[str, str], target: str,
              imports: tuple[str, ...] = ()) -> Outcome:  # fmt: skip
    """Run the job on `count` ranks with `environ` as their environment, and return how it ended. No rank is left.

    Args:
        imports: modules that every rank will need, for the fork server to import once.
    """
    meeting, lock = meeting_folder()
    timeout_s = float(plain["parallel"].get("timeout_s") or 600)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["isobatch.launch.no_gc", target.partition(":")[0], *imports])
    ranks = [Ranks(rank, count, rank, count) for rank in range(count)]
    workers = [
        context.Process(target=_work, args=(plain, run_dir, mine, meeting, environ, target), name=f"rank {mine.rank}")
        for mine in ranks
    ]
    try:
        # Ctrl-C and SIGTERM become a request that the ranks get from here; they sit in sessions of their own
        with STOP.installed():
            for worker in workers:
                worker.start()
            return _watch(workers, meeting, timeout_s)
    finally:
        for worker in workers:
            _end(worker)
        shutil.rmtree(meeting, ignore_errors=True)
        os.close(lock)


def meeting_folder() -> tuple[Path, int]:
    """A folder of this launch's own, and the lock in it by which the next one tells that it is in use.

    Those that a killed launcher left behind are removed.
    """
    import fcntl

    for left in Path(tempfile.gettempdir()).glob(f"{MEETING}*/{LOCK}"):
        with suppress(OSError):
            held = os.open(left, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(held).st_uid == os.getuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left.parent, ignore_errors=True)
            finally:
                os.close(held)
    folder = Path(tempfile.mkdtemp(prefix=MEETING))
    lock = os.open(folder / f"{LOCK}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with suppress(OSError):  # a file system without locks: the folder is then nobody's to remove
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(folder / f"{LOCK}.new", folder / LOCK)  # so that nobody sees it unlocked
    return folder, lock


def stop_fork_server() -> None:
    """End the fork server, which would otherwise outlive this process by its own slow exit."""
    server = getattr(forkserver, "_forkserver", None)
    pid = getattr(server, "_forkserver_pid", None)
    if pid is not None:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        with suppress(Exception):
            server._stop()  # type: ignore[union-attr]


def _watch(workers: list[ForkServerProcess], meeting: Path, timeout_s: float) -> Outcome:
    """Wait for all ranks: pass on a request to stop, and take all down when one failed or too long has passed."""
    alive: dict[Any, ForkServerProcess] = {worker.sentinel: worker for worker in workers}
    asked, deadline = 0, float("inf")
    killed: set[str] = set()
    dead: list[ForkServerProcess] = []
    while alive:
        for sentinel in wait(list(alive), timeout=TICK_S):
            worker = alive.pop(sentinel)
            worker.join()
            silent = not (meeting / f"{workers.index(worker)}.json").exists()  # an exit code 0 may be the user's own os._exit
            if (worker.exitcode or silent) and worker.name not in killed:
                dead.append(worker)
            # one that failed leaves its peers little time, one that is gone without a word next to none; one that is done
            # leaves them what a collective may take
            left = GONE_S if silent else PEERS_S if worker.exitcode else timeout_s
            deadline = min(deadline, time.monotonic() + left)
        try:
            if STOP.requested and not asked:
                asked, deadline = STOP.requested, min(deadline, time.monotonic() + max(30.0, timeout_s))
                for worker in alive.values():
                    worker.terminate()
        except KeyboardInterrupt:
            deadline = 0.0
        if time.monotonic() > deadline:
            killed.update(worker.name for worker in alive.values())
            for worker in alive.values():
                worker.kill()
    return _verdict(workers, dead, killed, meeting, asked, timeout_s)


def _verdict(workers: list[ForkServerProcess], dead: list[ForkServerProcess], killed: set[str], meeting: Path,
             asked: int, timeout_s: float) -> Outcome:  # fmt: skip
    notes: dict[str, Outcome] = {}
    for rank, worker in enumerate(workers):
        with suppress(OSError, ValueError):
            notes[worker.name] = Outcome.from_json((meeting / f"{rank}.json").read_text(encoding="utf-8"))
    for worker in dead:
        if worker.name not in notes:  # it had no time to say why, and whatever its peers say followed from that
            code = worker.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}, without a word"
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            line = f"{worker.name} {how}{hint}"
            return Outcome("failed", line=line, trace=f"isobatch: {line}", rank=workers.index(worker))
    if asked and (killed or cause(list(notes.values())).kind != "failed"):
        line = "stopped at once, without a last checkpoint" if killed else str(Stopped(asked))
        return Outcome("stopped", line=line, signum=asked)
    if killed and all(note.kind == "done" for note in notes.values()):
        line = f"{', '.join(sorted(killed))} did not end with the others"
        return Outcome("failed", line=line, trace=f"isobatch: {line}")
    found = cause([notes[worker.name] for worker in workers if worker.name in notes])
    silent = sorted(killed - set(notes))
    return (hung(found, ", ".join(silent), timeout_s) if silent else None) or found


def _end(worker: ForkServerProcess) -> None:
    """Kill what is left of a rank: itself, and after a moment the data workers that a killed rank leaves behind."""
    if worker.pid is None:
        return
    if worker.is_alive():
        worker.kill()
        worker.join()
    end = time.monotonic() + (0.0 if worker.exitcode and worker.exitcode < 0 else 3.0)
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < end:
            os.killpg(worker.pid, 0)
            time.sleep(0.05)
        os.killpg(worker.pid, signal.SIGKILL)


def _work(plain: dict[str, Any], run_dir: Path, ranks: Ranks, meeting: Path, environ: dict[str, str],
          target: str) -> None:  # fmt: skip
    """A rank's whole life. Ends with exit code 1 unless the job was done or stopped."""
    os.setsid()  # a group of its own: Ctrl-C reaches only the launching process, and data workers can be ended with it
    os.environ.clear()
    os.environ.update(environ, RANK=str(ranks.rank), LOCAL_RANK=str(ranks.local_rank),
                      WORLD_SIZE=str(ranks.world_size), LOCAL_WORLD_SIZE=str(ranks.local_world_size))  # fmt: skip
    streams.install()
    folder = RunFolder(run_dir) if ranks.is_main else None
    threading.Thread(target=_die_with_parent, args=(meeting, folder), daemon=True).start()
    log_to(run_dir, ranks.rank)

    def store() -> Any:
        import torch.distributed as dist

        return dist.FileStore(str(meeting / "store"), ranks.world_size)

    def report(outcome: Outcome) -> None:
        part = meeting / f"{ranks.rank}.part"
        part.write_text(outcome.to_json(), encoding="utf-8")
        os.replace(part, meeting / f"{ranks.rank}.json")
        if outcome.kind in ("refused", "failed"):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # no teardown that could hang; the launching process tells the story

    execute(plain, run_dir, ranks, store if ranks.world_size > 1 else None, target, report, own_terminal=False)


def _die_with_parent(meeting: Path, folder: RunFolder | None) -> None:
    """A launching process that was killed outright must not leave ranks behind."""
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    if folder is not None:
        folder.settle(Outcome("failed", line="the launching process was killed"))
        shutil.rmtree(meeting, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
