"""Reading by worker processes: one loader for a whole training, and nothing of it left behind."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from isobatch.data.samples import Failure, HostBatch, Samples
from isobatch.errors import JobFailed, reason
from isobatch.runtime import cores
from isobatch.runtime.randomness import DRAWING

if TYPE_CHECKING:
    from isobatch.data.device import ToDevice
    from isobatch.data.samples import Request

GRACE_S = 120  # how long a worker outlives a SIGTERM of its own: the training process takes a checkpoint meanwhile
LEFT_S = 5.0  # for a process that has closed its connections to be over
NAMED = 10  # unreadable files that are named one by one
log = logging.getLogger(__name__)


class _Requests:
    """The loader's batch sampler: what is to be read is set anew before each iteration."""

    def __init__(self) -> None:
        self.current: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for request in self.current:
            yield request.epoch, request.indices.tolist()


class _RemoteTrace(Exception):
    """Shows a worker's traceback as the cause of the one line."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkerSource:
    """Reads a split sample by sample, in `num_workers` processes or (0) in this one.

    Workers start with the first batch and live until `close`, across epochs (and, if `persistent`, across evaluations).
    They read ahead `prefetch` batches each. The training process's random generators stay as they are.
    """

    reads_on = torch.device("cpu")

    def __init__(self, samples: Samples, to_device: ToDevice, num_workers: int = 0, persistent: bool = True,
                 prefetch: int = 2, pin_memory: bool = False):  # fmt: skip
        self.samples, self.to_device = samples, to_device
        self.replaced: set[str] = set()
        self.requests = _Requests()
        self.loader: DataLoader | None = None
        self.iterator: Any = None
        if num_workers:
            fork = "fork" in multiprocessing.get_all_start_methods()
            with _quiet():
                self.loader = DataLoader(
                    samples,  # type: ignore[arg-type]
                    batch_sampler=self.requests,  # type: ignore[arg-type]
                    num_workers=num_workers, collate_fn=_as_read, pin_memory=pin_memory, worker_init_fn=_start_worker,
                    persistent_workers=persistent, prefetch_factor=prefetch,
                    multiprocessing_context="fork" if fork else None,
                    generator=torch.Generator(),  # else each iteration would draw from the global one
                )  # fmt: skip
        _LIVE.add(self)

    def batches(self, requests: Iterator[Request], keep: Callable[[Callable[[], tuple[Tensor, Tensor]]], Any] | None = None
                ) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
        """(inputs, targets) on the device for each request, in order. `keep`: see Source (feed.py).

        Raises:
            JobFailed: a sample could not be read, or a worker died.
        """
        read = self._checked(self._read(requests))
        return self.to_device.stream(read if keep is None else self._kept(read, keep))

    def _kept(self, batches: Iterator[HostBatch], keep: Callable[..., Any]) -> Iterator[HostBatch]:
        for batch in batches:
            keep(partial(self.to_device, batch))
            yield batch

    def _read(self, requests: Iterator[Request]) -> Iterator[HostBatch | Failure]:
        if self.loader is None:
            for request in requests:
                with DRAWING:  # shards may be running in other threads
                    batch = self.samples.isolated((request.epoch, request.indices.tolist()))
                yield batch
            return
        self.requests.current = requests
        try:
            with _quiet():
                self.iterator = iter(self.loader)
            _take_over_children()
            while True:
                _waiting.append(self)
                try:
                    batch = next(self.iterator)
                except StopIteration:
                    return
                finally:
                    _waiting.remove(self)
                yield batch
        except (RuntimeError, OSError, EOFError, _WorkerLost) as error:
            # OSError and EOFError: what a dead worker had read was still with it
            found = self.lost() or (self.left() if isinstance(error, OSError | EOFError) else self.lost(0))
            if not found and "DataLoader worker" not in str(error):
                raise
            found = found or reason(error, 160)
            raise JobFailed(f"data: a worker process died ({found}); if memory ran out, lower data.num_workers or "
                            "data.prefetch") from None  # fmt: skip

    def left(self) -> str:
        """`lost`, of a worker whose end is so fresh that it may not have been counted yet."""
        end = time.monotonic() + LEFT_S
        while not (found := self.lost() or self.lost(0)) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def lost(self, good: int | None = None) -> str:
        """How a worker ended that should not have; empty if none did. good: an exit code that is as bad (0: it left)."""
        for worker in getattr(self.iterator, "_workers", ()):
            code = worker.exitcode
            if code is not None and (code or code == good):
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                return f"process {worker.pid} {how}"
        return ""

    def _checked(self, batches: Iterator[HostBatch | Failure]) -> Iterator[HostBatch]:
        for batch in batches:
            if isinstance(batch, Failure):
                raise JobFailed(batch.line) from _RemoteTrace(batch.trace)
            for name in batch.replaced:
                self._note(name)
            yield batch

    def _note(self, name: str) -> None:
        if name in self.replaced:
            return
        self.replaced.add(name)
        if len(self.replaced) <= NAMED:
            log.warning("data: %s (replaced by the next sample)", name)

    def aside(self) -> WorkerSource:
        """One that reads the same in this process, while the workers of this one go on."""
        return WorkerSource(self.samples, self.to_device)

    def close(self) -> None:
        """End all workers and wait for them; nothing of this source runs afterwards. Can be called twice."""
        if len(self.replaced) > NAMED:
            log.warning("data: %d samples could not be read and were replaced", len(self.replaced))
        self.replaced = set()
        iterator, self.iterator = self.iterator, None
        if self.loader is not None:
            self.loader._iterator = None
        if iterator is None:
            return
        workers = list(getattr(iterator, "_workers", []))
        iterator._shutdown_workers()
        for worker in workers:
            if worker.is_alive():
                worker.kill()
            worker.join()


class _WorkerLost(Exception):
    """Raised where the training process waits for a batch, and nowhere else."""


_waiting: list[WorkerSource] = []


def _take_over_children() -> None:
    """torch's handler of SIGCHLD raises wherever the training happens to stand, in a step or a save too; this one does not."""
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, _child_ended)


def _child_ended(signum: int, frame: Any) -> None:
    for source in _waiting:
        if source.lost():
            raise _WorkerLost


_LIVE: weakref.WeakSet[WorkerSource] = weakref.WeakSet()


@contextmanager
def _quiet() -> Iterator[None]:
    """Workers are forked knowingly: before they start a thread, and as many as the user asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
        yield


def _as_read(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    """First of all in a worker process.

    Ctrl-C and SIGTERM reach the whole process group; what happens then is the training process's to decide, and it needs
    the batches under way. The training's own iterators came along with the fork; if they were cleaned up here they would
    shut down processes that are not this one's children.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda signum, frame: signal.alarm(GRACE_S))
    for source in list(_LIVE):
        if source.iterator is not None:
            source.iterator._shutdown = True


def choose_workers(asked: int | None, light: bool, on_gpu: bool, local_world_size: int) -> int:
    """`data.num_workers`, or what suits this machine: none for what is in memory, else by this rank's share of the cores.

    With a GPU all but one core of the share; on a CPU the training needs the cores itself.
    """
    if asked is not None:
        return asked
    if light and not on_gpu:
        return 0
    share = cores.usable() // local_world_size
    return min(16, max(1, share - 1 if on_gpu else share // 2))
