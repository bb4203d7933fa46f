"""Commands that start warm: forked from a process that has imported all of it, which is most of a command's CPU time.

`Popen` and `run` are subprocess's, for `[sys.executable, (-P) script or -m module, *words]`. What is started is a process like
any other: its own pid, session, environment, folder, pipes, signals and exit status, with a fresh `__main__`. What is not
as after a cold start: modules are there already. So a test of what a start imports, or of what has to be set before torch
reads it, starts cold; ISOBATCH_COLD=1 starts everything cold, as `make test-all` does.
"""

from __future__ import annotations

import array
import atexit
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("server.py")
READY_S = 150
COLD = "ISOBATCH_COLD"
SHARED = "ISOBATCH_WARM"  # the address of the server that all workers of a test run share
_shared = os.environ.pop(SHARED, None)  # of no interest to what the tests start


class Server:
    """The process that is forked: made when the first command starts, gone with this one.

    Args:
        preload: modules that it imports; none: what a command does.
        listener: where it takes others' tasks too.
    """

    def __init__(self, preload: Sequence[str] = (), listener: socket.socket | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        fds = [one.fileno() for one in (theirs, listener) if one]
        self.process = subprocess.Popen([sys.executable, str(SERVER), ",".join(map(str, fds)), *preload], env=environ,
                                        cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=fds,
                                        start_new_session=True)  # fmt: skip
        theirs.close()
        self.socket, self.owner = ours, os.getpid()
        ours.settimeout(READY_S)
        atexit.register(self.close)
        self.works = listener is not None or self.is_ready()

    def is_ready(self) -> bool:
        """False: it will not fork, since a library of this machine has started threads."""
        try:
            return self.socket.recv(16) == b"ready"
        except ConnectionError:
            return False

    def close(self) -> None:
        if self.owner == os.getpid():
            self.socket.close()
            self.process.wait()

    def start(self, task: dict[str, Any], fds: list[int]) -> int:
        packed = array.array("i", fds)
        self.socket.sendmsg([json.dumps(task).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])
        pid = int(self.socket.recv(16) or b"0")
        assert pid, "the server of warm starts is gone"
        return pid


class Shared(Server):
    """The server of the process that hands out the tests, as a worker sees it."""

    def __init__(self, address: str) -> None:
        self.socket, self.owner = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), os.getpid()
        self.socket.settimeout(READY_S)
        self.socket.connect(address)
        atexit.register(self.socket.close)
        self.works = self.is_ready()


def share() -> None:
    """In the process that hands out the tests: one server for all of its workers, which start after this."""
    if os.environ.get(COLD) == "1":
        return
    folder = tempfile.TemporaryDirectory(prefix="warm")
    atexit.register(folder.cleanup)
    os.environ[SHARED] = str(Path(folder.name) / "server")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.environ[SHARED])
        listener.listen(64)
        Server(listener=listener)


_servers: dict[tuple[str, ...], Server] = {}


def server(preload: tuple[str, ...] = ()) -> Server | None:
    """Of processes that have imported `preload` (of none: what a command does). None: everything starts cold."""
    if os.environ.get(COLD) == "1":
        return None
    if preload not in _servers or _servers[preload].owner != os.getpid():
        _servers[preload] = Shared(_shared) if _shared and not preload else Server(preload)
    return _servers[preload] if _servers[preload].works else None


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """subprocess.Popen whose process is the server's child: how it ended comes through a pipe."""

    _preload: tuple[str, ...] = ()
    _status: int | None = None

    def __init__(self, words: Sequence[str], *, preload: tuple[str, ...] = (), **options: Any) -> None:
        self._preload = preload
        super().__init__(words, **options)

    def _execute_child(self, *given: Any) -> None:  # type: ignore[override]
        asked = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        words = [os.fspath(word) for word in asked["args"]]
        warm = server(self._preload) if words[0] == sys.executable and words[1:2] != ["-c"] and not asked["shell"] else None
        if warm is None:
            return super()._execute_child(*given)  # type: ignore[misc]
        ends, told = os.pipe()
        mine = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        environ = dict(os.environ if asked["env"] is None else asked["env"])
        task = {"words": words[1:], "environ": environ, "cwd": os.fspath(asked["cwd"] or os.getcwd()),
                "session": bool(asked["start_new_session"])}  # fmt: skip
        try:
            self.pid = warm.start(task, [*(number if own == -1 else own for number, own in enumerate(mine)), told])
        finally:
            os.close(told)
        self._child_created, self._status = True, ends
        self._close_pipe_fds(*(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._status is None:
            return super()._try_wait(flags)  # type: ignore[misc]
        if flags and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        said = os.read(self._status, 16)
        os.close(self._status)
        self._status = None
        assert said, "the server of warm starts was killed"
        return self.pid, int(said)

    def _internal_poll(self, *given: Any, **more: Any) -> int | None:
        if self._status is not None and self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
            return self.returncode
        return super()._internal_poll(*given, **more)  # type: ignore[misc]


def run(words: Sequence[str | Path], *, timeout: float = 200, capture_output: bool = False, check: bool = False,
        **options: Any) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """subprocess.run of text."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen([os.fspath(word) for word in words], text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
