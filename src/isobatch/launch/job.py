"""One job in this process, as one of its ranks: everything between "here is the config" and its outcome."""

from __future__ import annotations

import importlib
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isobatch.launch.outcome import Outcome
from isobatch.launch.signals import STOP
from isobatch.run_folder import layout
from isobatch.runtime import garbage
from isobatch.runtime.distributed import Ranks

TARGET = "isobatch.run:run_job"  # imported late: it brings torch, which a launching process must not pay for


def load_target(target: str) -> Callable[[dict[str, Any], Path, Ranks], float | None]:
    """The function that `module:name` means."""
    module, _, name = target.partition(":")
    found: Callable[[dict[str, Any], Path, Ranks], float | None] = getattr(importlib.import_module(module), name)
    return found


def execute(plain: dict[str, Any], run_dir: Path, ranks: Ranks, store: Callable[[], Any] | None = None,
            target: str = TARGET, report: Callable[[Outcome], None] = lambda outcome: None,
            own_terminal: bool = True) -> Outcome:  # fmt: skip
    """Train in this process and return how it ended, whatever happens.

    Args:
        store: makes the store in which the ranks meet; a process group lives exactly as long as the job.
        report: gets the outcome while the group still stands, so that a cause is on record before the peers notice.
        own_terminal: False where another process handles Ctrl-C for this one.
    """
    with STOP.installed(from_terminal=own_terminal, quiet=not (own_terminal and ranks.is_main)):
        try:
            run_job = load_target(target)
            garbage.keep()
            if store is None:
                outcome = Outcome("done", run_job(plain, run_dir, ranks))
            else:
                outcome = Outcome("done", _in_group(run_job, plain, run_dir, ranks, store), rank=ranks.rank)
        except KeyboardInterrupt:
            outcome = Outcome("stopped", line="stopped at once, without a last checkpoint", rank=ranks.rank,
                              signum=STOP.requested or signal.SIGINT)  # fmt: skip
        except (Exception, SystemExit) as error:
            outcome = Outcome.of(error, ranks.rank)
        report(outcome)
        if store is not None:
            _leave_group()
    return outcome


def _in_group(run_job: Callable[[dict[str, Any], Path, Ranks], float | None], plain: dict[str, Any], run_dir: Path,
              ranks: Ranks, store: Callable[[], Any]) -> float | None:  # fmt: skip
    from isobatch.runtime import distributed

    parallel = plain["parallel"]
    device = distributed.choose_device(ranks, plain.get("device"))  # refuses before any group is made
    backend = distributed.choose_backend(parallel.get("backend"), device.type)
    distributed.create_group(ranks, backend, store(), parallel.get("timeout_s") or 600, device)
    return run_job(plain, run_dir, ranks)


def _leave_group() -> None:
    if "torch" in sys.modules:
        from isobatch.runtime import distributed

        distributed.destroy_group()


def log_to(run_dir: Path, rank: int) -> None:
    """Logging of a rank that Hydra did not start: rank 0 as Hydra would, the others' warnings into the same file."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    where = "" if rank == 0 else f"[rank {rank}]"
    file = logging.FileHandler(run_dir / layout.LOG, encoding="utf-8")
    file.setFormatter(logging.Formatter(f"[%(asctime)s][%(name)s][%(levelname)s]{where} - %(message)s"))
    file.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root.setLevel(logging.INFO)
    root.addHandler(file)
    if rank == 0:
        console = logging.StreamHandler(sys.stdout)
        console.setFormatter(logging.Formatter("%(message)s"))
        root.addHandler(console)
