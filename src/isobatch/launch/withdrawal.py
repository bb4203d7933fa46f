"""A rank takes its node out of an elastic launch: the agent that started it leaves, and the others meet again without it."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Mapping

from isobatch.runtime.distributed import ranks_from_environment


def withdraw(environ: Mapping[str, str] | None = None) -> str:
    """End the agent of torchrun that started this process, as a scheduler would that takes a node away; returns what was
    done, in words. Nothing where the launch has no other node, or no agent.

    A signal is what torchrun expects then: it ends its own ranks, and leaves the rendezvous open for the others.
    """
    host, ranks = platform.node(), ranks_from_environment(environ)
    if "TORCHELASTIC_RUN_ID" not in (os.environ if environ is None else environ):
        return f"host {host} cannot be left out, as torchrun did not start the run: start it again elsewhere"
    if ranks.local_world_size == ranks.world_size:
        return f"host {host} cannot be left out, as the launch has no other: start it again elsewhere"
    os.kill(os.getppid(), signal.SIGTERM)
    return f"host {host} leaves the launch"
