"""Imported first by the fork server, whose imports its ranks share, for what it does there: see `cli.main`."""

from __future__ import annotations

import gc

gc.disable()
