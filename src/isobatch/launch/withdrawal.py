"""A rank takes its node out of an elastic launch: the agent that started it leaves, and the others meet again without it."""

from __future__ import annotations

import os
import platform
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from isobatch.runtime.distributed import ranks_from_environment

ELSEWHERE = "start it again elsewhere"
LISTENS = "0A"  # in the kernel's table of sockets


class LaunchNode:
    """The machine of this rank, as a part of its launch."""

    def __init__(self, environ: Mapping[str, str] | None = None):
        self.environ, self.host = os.environ if environ is None else environ, platform.node()
        self.agent = os.getppid()

    def hindrance(self) -> str:
        """Why the launch cannot go on without it, in words; "" = it can."""
        if alone := self._nothing_to_leave():
            return alone
        if serves(self.agent, rendezvous_port(self.agent, self.environ)):
            return f"host {self.host} serves the rendezvous, and the launch ends with it"
        return ""

    def _nothing_to_leave(self) -> str:
        """Why there is nothing to leave, in words; "" = the launch has other nodes."""
        ranks = ranks_from_environment(self.environ)
        if "TORCHELASTIC_RUN_ID" not in self.environ:
            return f"host {self.host} cannot be left out, as torchrun did not start the run"
        if ranks.local_world_size == ranks.world_size:
            return f"host {self.host} cannot be left out, as the launch has no other"
        return ""

    def withdraw(self) -> str:
        """End the agent of torchrun that started this process, as a scheduler would that takes a node away; returns what was
        done, in words. Nothing where the launch has no other node, or no agent.

        A signal is what torchrun expects then: it ends its own ranks, and leaves the rendezvous open for the others.
        """
        hindrance = self.hindrance()
        if not self._nothing_to_leave():
            os.kill(self.agent, signal.SIGTERM)
        return f"{hindrance}: {ELSEWHERE}" if hindrance else f"host {self.host} leaves the launch"


def rendezvous_port(agent: int, environ: Mapping[str, str]) -> int:
    """Where the nodes of the launch meet, as torchrun was told: by its command line or its environment; 0 = not known."""
    said = environ.get("PET_RDZV_ENDPOINT", "")
    with suppress(OSError):
        words = Path(f"/proc/{agent}/cmdline").read_bytes().decode(errors="replace").split("\0")
        found = re.search(r"(?:^|\0)--rdzv[-_]endpoint[=\0]([^\0]+)", "\0".join(words))
        said = found[1] if found else said
    port = said.rpartition(":")[2] if ":" in said else "29400"  # torchrun's default
    return int(port) if said and port.isdigit() else 0


def serves(pid: int, port: int) -> bool:
    """Whether a process listens on this TCP port, as far as the kernel tells."""
    with suppress(OSError):
        own = {found[1] for fd in Path(f"/proc/{pid}/fd").iterdir() if (found := re.match(r"socket:\[(\d+)\]", link(fd)))}
        for table in ("tcp", "tcp6"):
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    words = line.split()
                    if words[3] == LISTENS and int(words[1].rpartition(":")[2], 16) == port and words[9] in own:
                        return True
    return False


def link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed in the meantime
        return ""
