"""Where ranks meet that no torchrun has brought together: a key-value store that rank 0 serves.

Tasks of srun and mpirun know nothing of each other but their job, so the port follows from the job. It may be taken, by another
program or by another job: rank 0 goes through several, and leaves the job's name in the store, by which the others know it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from isobatch.errors import ConfigError, JobFailed
from isobatch.launch.waiting import TICK_S
from isobatch.runtime.distributed import Ranks

PORTS = 20000, 12000  # from, how many: below those that systems give to whoever asks for any
MOST = 16  # ports that are tried
JOB = "ISOBATCH_JOB"  # in the environment: what the ports follow from
PROBE_S = 5.0  # for a machine to say whether anything listens


def by_job(job: str, environ: MutableMapping[str, str]) -> None:
    """Let this process meet the others of `job`, unless somebody has said where (MASTER_PORT)."""
    if "MASTER_PORT" not in environ:
        environ.update({JOB: job, "MASTER_PORT": str(ports_of(job)[0])})


def ports_of(job: str) -> list[int]:
    """The same for every task of a job."""
    return [PORTS[0] + zlib.crc32(f"{job}/{k}".encode()) % PORTS[1] for k in range(MOST)]


def served(ranks: Ranks, limit_s: float) -> Any:
    """The store, which rank 0 serves at MASTER_ADDR; waits for rank 0 alone.

    Raises:
        ConfigError: the port is taken, or all that would do. JobFailed: rank 0 was not found within `limit_s`.
    """
    job, typed = os.environ.get(JOB), os.environ.get("MASTER_PORT", "29500")
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    ports = [int(typed)] if job is None else ports_of(job)
    if ranks.is_main or job is None:
        return _serve(address, ports, ranks, limit_s, job)
    end, probes = time.monotonic() + limit_s, dict[int, Probe]()
    while time.monotonic() < end:
        for port in ports:
            if port in probes and not probes[port].is_alive() and (found := probes.pop(port).store) is not None:
                return found
            if port not in probes and listens(address, port):
                probes[port] = Probe(address, port, ranks, limit_s, job)
        time.sleep(TICK_S)
    raise JobFailed(f"nothing was heard of rank 0 within {limit_s:.0f} s")


class Probe(threading.Thread):
    """Looks for the store of a job at a port: whoever else is there may leave torch waiting for an answer for ever."""

    def __init__(self, address: str, port: int, ranks: Ranks, limit_s: float, job: str):
        super().__init__(daemon=True)
        self.at, self.job, self.store = (address, port, ranks, limit_s), job, None
        self.start()

    def run(self) -> None:
        with suppress(RuntimeError):
            store = _store(*self.at)
            if store.check([f"job/{self.job}"]):  # else of another job, or of this one a moment too early
                self.store = store


def listens(address: str, port: int) -> bool:
    """Whether somebody is there; torch would tell a person each time that nobody is."""
    try:
        socket.create_connection((address, port), timeout=PROBE_S).close()
    except OSError:
        return False
    return True


def _store(address: str, port: int, ranks: Ranks, limit_s: float) -> Any:
    import torch.distributed as dist

    # without waiting for all ranks inside of torch: which of them are missing is found out later
    return dist.TCPStore(address, port, ranks.world_size, ranks.is_main, timedelta(seconds=limit_s), wait_for_workers=False,
                         multi_tenant=True)  # fmt: skip


def _serve(address: str, ports: list[int], ranks: Ranks, limit_s: float, job: str | None) -> Any:
    for port in ports:
        try:
            store = _store(address, port, ranks, limit_s)
        except RuntimeError as error:  # DistNetworkError is one
            if not taken(error):
                raise
            continue
        if job is not None:
            store.set(f"job/{job}", "1")
        return store
    tried = f"port {ports[0]} is" if len(ports) == 1 else f"{len(ports)} ports ({ports[0]}, {ports[1]}, ...) are"
    raise ConfigError(
        "MASTER_PORT", ports[0], f"{tried} in use on this machine", "set another port, or let torchrun choose one"
    )


def taken(error: Exception) -> bool:
    return "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
