"""Imported first by the fork server, whose imports its ranks share, for what it does there."""

from __future__ import annotations

import signal

from isobatch.runtime import garbage

garbage.off()
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that closes is the launching process's business, as Ctrl-C is
