"""The process that warm starts are forked from (see __init__.py). It has one thread, or it forks nothing.

It imports what a command does, or what further arguments name, and waits for tasks on the socket whose number is its first
argument; a second number there is of a socket on which others ask for a connection of their own. A child leaves the loop and
becomes the command.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

PRELOAD = ("hydra", "hydra.main", "omegaconf", "numpy", "torch", "torch._dynamo", "torch.distributed", "torch.utils.data",
           "safetensors.torch", "rich.console", "rich.table", "rich.progress", "matplotlib.figure",
           "matplotlib.backends.backend_agg", "PIL.Image", "isobatch.cli.command", "isobatch.run",
           "isobatch.report")  # fmt: skip
INSTALLED = [entry for entry in sys.path[1:] if entry not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
HIGH = 700  # descriptors of ours, where no other process puts one by its number


def serve(control: socket.socket, listener: socket.socket | None) -> dict | None:
    """Fork for each task until the tests are gone (None); returns its task in each child."""
    import json
    import select

    def reap() -> None:
        while told:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with suppress(OSError):  # nobody waits for it
                os.write(told[pid], str(status).encode())
            os.close(told.pop(pid))

    told: dict[int, int] = {}
    awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    asking, listening = [control], [listener] if listener else []
    while True:
        ready = select.select([awake, *listening, *asking], [], [])[0]
        if awake in ready:
            os.read(awake, 4096)
            reap()
        if listener in ready:
            asking.append(listener.accept()[0])
            with suppress(OSError):
                asking[-1].send(b"ready")
        for one in [one for one in asking if one in ready]:
            text, fds = b"", []
            with suppress(ConnectionError):  # one that was killed
                text, fds, *_ = socket.recv_fds(one, 1 << 20, 4)
            if not text and one is control:
                return None
            if not text:
                asking.remove(one)
                one.close()
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (awake, wake, fds[3], *told.values()):
                    os.close(number)
                for other in (*listening, *asking):
                    other.close()
                return {**json.loads(text), "fds": fds[:3]}
            for number in fds[:3]:
                os.close(number)
            told[pid] = fds[3]
            with suppress(OSError):
                one.send(str(pid).encode())


def become(task: dict) -> str:
    """Give this process the descriptors, session, folder, environment and words of `task`; returns its script or module."""
    from multiprocessing import process

    keep_shared_folders()
    if task["session"]:
        os.setsid()
    for number, given in enumerate(task["fds"]):
        os.dup2(given, number)
    for given in set(task["fds"]) - {0, 1, 2}:
        os.close(given)
    os.chdir(task["cwd"])
    os.environ.clear()
    os.environ.update(task["environ"])
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    safe = task["words"][0] == "-P"  # the script's folder is not searched
    task["words"] = task["words"][safe:]
    module, words = (task["words"][1], task["words"][2:]) if task["words"][0] == "-m" else ("", task["words"][1:])
    script = module or task["words"][0]
    sys.argv = [script, *words]
    process.ORIGINAL_DIR = os.getcwd()  # taken at its import; what it starts goes there, and looks for the script there
    sys.orig_argv = [sys.executable, *task["words"]]
    first = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    sys.path[:] = [*([] if safe else [first]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *INSTALLED]
    return script


def keep_shared_folders() -> None:
    """wandb makes a folder for pictures at its import and removes it at its end: the server's, not that of each child."""
    import atexit

    made = getattr(sys.modules.get("wandb.sdk.data_types._private"), "MEDIA_TMP", None)
    if made is not None:
        atexit.unregister(made.cleanup)
        made._finalizer.detach()


def keep_a_fork_server() -> None:
    """A child that stands ready to be multiprocessing's fork server, which would import torch once more.

    As that one it is a child of the command, in its session, with its descriptors 1 and 2; unused it ends with the command.
    """
    from multiprocessing import util

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _stand_ready(theirs)
        return
    theirs.close()
    cold = util.spawnv_passfds

    def start(path: bytes, args: list, passed: list) -> int:
        code = args[-1]
        if util.spawnv_passfds is not start or not str(code).startswith("from multiprocessing.forkserver import main"):
            return cold(path, args, passed)
        util.spawnv_passfds = cold
        numbers = " ".join(map(str, passed))
        socket.send_fds(ours, [f"{numbers}\n{code}".encode()], list(passed))
        ours.close()
        return pid

    util.spawnv_passfds = start


def _stand_ready(theirs: socket.socket) -> None:
    import fcntl

    own = socket.socket(fileno=fcntl.fcntl(theirs.detach(), fcntl.F_DUPFD_CLOEXEC, HIGH))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until it is one
    text, fds, *_ = socket.recv_fds(own, 1 << 20, 8)
    if not text:
        os._exit(0)
    numbers, _, code = text.decode().partition("\n")
    high = [fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, HIGH) for given in fds]
    for given in fds:
        os.close(given)
    for given, number in zip(high, map(int, numbers.split()), strict=True):
        os.dup2(given, number)
        os.close(given)
    own.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    os._exit(0)


def perform(named: str, module: bool) -> None:
    """What `python named` or `python -m named` does."""
    import runpy
    import types

    if module:
        runpy.run_module(named, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__file__=named, __builtins__=__builtins__)
    with open(named, "rb") as file:
        code = compile(file.read(), named, "exec")
    exec(code, main.__dict__)


def finish(named: str, module: bool) -> None:
    """Perform, and end as the interpreter does, but for taking apart all modules, which costs as much as a command."""
    import atexit
    import threading

    code: object = 0
    try:
        perform(named, module)
    except SystemExit as leaving:
        code = leaving.code
    except BaseException as error:
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        sys.excepthook(type(error), error, error.__traceback__)
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:  # under nohup, or behind a shell's &
            signal.signal(number, usual)
    socket_of_tests, listening, *_ = [*(socket.socket(fileno=int(number)) for number in sys.argv[1].split(",")), None]
    for one in filter(None, (socket_of_tests, listening)):
        os.set_inheritable(one.fileno(), False)
    import gc
    import importlib

    gc.disable()
    for name in sys.argv[2:] or PRELOAD:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit()
    gc.freeze()
    gc.enable()
    socket_of_tests.send(b"ready")
    task = serve(socket_of_tests, listening)
    if task is not None:
        named = become(task)
        if any("nproc" in word or word.startswith("plan=") for word in task["words"]):
            keep_a_fork_server()
        finish(named, task["words"][0] == "-m")
