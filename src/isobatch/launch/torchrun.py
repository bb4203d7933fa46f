"""Ranks that torchrun (or srun) started: rank 0 runs Hydra, the others follow it.

Rank 0 alone reads the command line, picks the run folder and orders the jobs of a sweep. It hands each job's config to
the others through the launcher's own key-value store, so there is one folder, one log and one error, and any sweeper
stays in step.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from isobatch.errors import ConfigError, JobFailed, reason
from isobatch.launch import devices, last_folder, meeting
from isobatch.launch.job import execute, log_to
from isobatch.launch.outcome import Outcome, RunFolder, cause, hung
from isobatch.launch.signals import STOP
from isobatch.launch.waiting import ARRIVE_S, TICK_S, arrive_s, attended
from isobatch.runtime.distributed import Ranks, ranks_from_environment

TROUBLE_S = 15.0  # for a rank to come out of a job that failed elsewhere (nccl does not notice by itself)
FALLOUT_S = 2.0  # for other ranks to name an earlier cause than rank 0's own
BYE_S = 10.0

_jobs = iter(range(10**9))
_tried: list[bool] = []  # whether this rank began to meet the others
_silent: set[int] = set()  # ranks that did not report the end of a job: nobody waits for them again
_remembered: dict[str, str] = {}  # rank 0: what all ranks know of the run folder (last_folder.py)


@functools.cache
def root_store() -> Any:
    """The agent's store under torchrun, else one that rank 0 serves (meeting.py, also for what is raised)."""

    def made() -> Any:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            from torch.distributed.rendezvous import rendezvous

            return next(iter(rendezvous("env://", timeout=timedelta(seconds=arrive_s()))))[0]
        return meeting.served(ranks_from_environment(), arrive_s())

    return attended(made)


@functools.cache
def store() -> Any:
    """`root_store` under a prefix that this set of processes, and no earlier one, shares.

    torchrun keeps one store across --max-restarts, where a restarted rank would find the dead attempt's keys, and its
    restart count differs between the node that failed and those that did not. So the ranks agree on an epoch here: rank
    0 counts it up, and each follower says hello with a token that only this process knows until it is welcomed.
    """
    import torch.distributed as dist

    _tried.append(True)
    ranks, raw = ranks_from_environment(), root_store()
    if ranks.is_main:
        epoch = str(raw.add("epoch", 1))
        missing, end = set(range(1, ranks.world_size)), time.monotonic() + arrive_s()
        greeted: dict[int, str] = {}
        while missing:
            for rank in sorted(missing):
                if raw.check([f"ack/{epoch}/{rank}"]):
                    missing.discard(rank)
                    _remembered.update(json.loads(raw.get(f"ack/{epoch}/{rank}")))
                elif raw.check([f"hello/{rank}"]):
                    token = raw.get(f"hello/{rank}").decode()  # may be a dead process's: nobody reads that welcome
                    if greeted.get(rank) != token:
                        raw.set(f"welcome/{token}", epoch)
                        greeted[rank] = token
            if missing and time.monotonic() > end:
                listed = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, sorted(missing)))}"
                raise JobFailed(f"{listed} of {ranks.world_size} did not arrive within {arrive_s():.0f} s: "
                                "every node has to start its own")  # fmt: skip
            time.sleep(TICK_S)
    else:
        token = uuid.uuid4().hex
        raw.set(f"hello/{ranks.rank}", token)
        _until(lambda: raw.check([f"welcome/{token}"]), arrive_s())
        if not raw.check([f"welcome/{token}"]):
            raise JobFailed(f"nothing was heard of rank 0 within {arrive_s():.0f} s")
        epoch = raw.get(f"welcome/{token}").decode()
        raw.set(f"ack/{epoch}/{ranks.rank}", json.dumps(last_folder.recall()))
    return dist.PrefixStore(f"epoch{epoch}", raw)


def run_folder(parent: str, make: Callable[[str], str]) -> str:
    """The launch's run folder in `parent`: an earlier attempt's, if any rank's machine remembers one, else `make`'s."""
    if ranks_from_environment().world_size > 1:
        store()  # the others have said by then what they remember
    found = last_folder.recall().get(parent) or _remembered.get(parent) or make(parent)
    last_folder.remember({parent: found})
    return found


def run_led(plain: dict[str, Any], run_dir: Path, ranks: Ranks, target: str) -> Outcome:
    """Rank 0: run the next job with all ranks and return the outcome that tells its story."""
    number = next(_jobs)
    store().set(f"job{number}", json.dumps({"plain": plain, "run_dir": str(run_dir), "target": target,
                                            "folders": last_folder.recall()}))  # fmt: skip

    timeout_s = float(plain["parallel"].get("timeout_s") or 600)

    def give_up(trouble: Outcome) -> None:
        # the main thread sits in what will never end, so this launch ends here
        trouble = hung(trouble, "rank 0", timeout_s) or trouble
        RunFolder(run_dir).settle(trouble)
        print(trouble.trace.rstrip(), file=sys.stderr, flush=True)
        store().set("end", "1")
        os._exit(1)

    mine = _run_joined(number, plain, run_dir, ranks, target, give_up)
    keys = {rank: f"outcome{number}/{rank}" for rank in range(1, ranks.world_size)}
    limit = timeout_s if mine.kind == "done" else FALLOUT_S
    _until(lambda: store().check(list(keys.values())), limit)
    theirs = {rank: Outcome.from_json(store().get(key)) for rank, key in keys.items() if store().check([key])}
    _silent.update(set(keys) - set(theirs))
    if len(theirs) < len(keys):
        silent = sorted(set(keys) - set(theirs))
        return hung(mine, f"rank {', '.join(map(str, silent))}", timeout_s) or _without_a_word(mine, silent, limit)
    return cause([mine, *theirs.values()])


def _without_a_word(mine: Outcome, silent: list[int], waited_s: float) -> Outcome:
    """The outcome where ranks said nothing: killed, if rank 0 lost the connection to them."""
    names = "rank " + ", ".join(map(str, silent))
    if mine.kind == "done":
        line = f"{names} did not end within {waited_s:.0f} s of rank 0"
    elif mine.kind == "failed" and "by peer" in mine.line:
        line = f"{names} was lost without a word (killed?)"
    else:
        return mine
    return Outcome("failed", line=line, trace=f"isobatch: {line}", rank=silent[0])


def follow() -> NoReturn:
    """Every other rank: run the jobs that rank 0 announces, and exit with its code when it says so."""
    ranks = ranks_from_environment()
    code: int | str | None = 1
    try:
        _follow(ranks)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as leaving:
        code = leaving.code
    except Exception as error:  # the store is gone, so rank 0 is, and it has told the story
        code = f"isobatch: rank {ranks.rank} lost rank 0 ({reason(error)})"
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    if code:
        leave(code)
    sys.exit(0)


def _follow(ranks: Ranks) -> None:
    shared, patience = store(), ARRIVE_S
    for number in range(10**9):
        # a stop that ended the job at rank 0 too comes with its "end"; if rank 0 is dead, torchrun waits for this rank
        limit = time.monotonic() + (FALLOUT_S if STOP.requested else patience)
        while not shared.check([f"job{number}"]):
            if shared.check(["end"]):
                code = int(shared.get("end"))
                shared.set(f"bye{ranks.rank}", "1")
                if code:  # torchrun stops all at the first one that ends badly, and calls it the cause: rank 0 it is
                    time.sleep(BYE_S / 10)
                sys.exit(code)
            if time.monotonic() > limit:
                if STOP.requested:
                    sys.exit(128 + STOP.requested)
                sys.exit(f"isobatch: rank {ranks.rank} heard nothing from rank 0 for {patience:.0f} s")
            time.sleep(TICK_S)
        message = json.loads(shared.get(f"job{number}"))
        last_folder.remember(message["folders"])
        run_dir = Path(message["run_dir"])
        run_dir.mkdir(parents=True, exist_ok=True)  # on another machine it may not be there
        log_to(run_dir, ranks.rank)
        ended = _run_joined(number, message["plain"], run_dir, ranks, message["target"], lambda trouble: os._exit(1))
        patience = 2 * TROUBLE_S if ended.kind == "failed" else ARRIVE_S  # by then rank 0 has failed too, or is dead


def leave(code: int) -> NoReturn:
    """End this process now. torchrun restarts nobody before all are gone, and to take torch apart takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


def finish(code: int) -> None:
    """Rank 0, last of all: let the others go with the same exit code."""
    ranks = ranks_from_environment()
    met = store.cache_info().currsize > 0
    if ranks.world_size == 1 or not ranks.is_main or (not met and (_tried or code > 128)):
        return  # they did not meet when they should have, or a signal came before, which the others have got as well
    with contextlib.suppress(Exception):  # without a store there is nobody to tell
        shared = store()
        shared.set("end", str(code))
        # rank 0 may be the one that serves the store, so it leaves last; after a failure some may be dead, and torchrun
        # restarts nobody before all are gone
        expected = [f"bye{rank}" for rank in range(1, ranks.world_size) if rank not in _silent]
        _until(lambda: not expected or shared.check(expected), FALLOUT_S if code else BYE_S)


def _run_joined(number: int, plain: dict[str, Any], run_dir: Path, ranks: Ranks, target: str,
                give_up: Callable[[Outcome], None]) -> Outcome:  # fmt: skip
    """One job on this rank, in a process group that lives as long as the job."""
    import torch.distributed as dist

    shared = store()

    def report(outcome: Outcome) -> None:
        shared.set(f"outcome{number}/{ranks.rank}", outcome.to_json())
        if outcome.kind == "failed":
            shared.compare_set(f"trouble{number}", "", outcome.to_json())

    try:
        shown = devices.visible_devices(plain["parallel"].get("devices"), os.environ.get(devices.VARIABLE))
        with devices.showing(shown), _watching(number, give_up):
            # a prefix of its own: a second group over the same keys finds the first one's dead addresses
            return execute(plain, run_dir, ranks, lambda: dist.PrefixStore(f"group{number}", shared), target, report)
    except ConfigError as error:
        outcome = Outcome.of(error, ranks.rank)
        report(outcome)
        return outcome


@contextlib.contextmanager
def _watching(number: int, give_up: Callable[[Outcome], None]) -> Iterator[None]:
    """Call `give_up` when a rank has failed and this one is still inside the job TROUBLE_S later."""
    shared, over = store().clone() if hasattr(store(), "clone") else store(), threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            if shared.check([f"trouble{number}"]):
                if not over.wait(TROUBLE_S):
                    give_up(Outcome.from_json(shared.get(f"trouble{number}")))
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _until(condition: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(TICK_S)


__all__ = ["STOP", "finish", "follow", "leave", "root_store", "run_folder", "run_led"]
