"""Group `parallel`: where the replicas of the model live.

A strategy answers: how many processes does this run start itself, how many replicas does that make, which of them live
in this process, and how is the model wrapped so that their gradients meet.
"""

from __future__ import annotations

from typing import Any

from isobatch.marks import Marks
from isobatch.parallel.base import Single
from isobatch.parallel.data_parallel import DataParallel
from isobatch.parallel.fully_sharded import FullySharded
from isobatch.parallel.processes import DistributedDataParallel, Processes

__all__ = ["MARKS", "TABLE", "DataParallel", "DistributedDataParallel", "FullySharded", "Processes", "Single"]

TABLE: dict[str, Any] = {"single": Single, "dp": DataParallel, "ddp": DistributedDataParallel, "fsdp": FullySharded}
MARKS = Marks(resume="free", speed=True)  # how the shards are dealt, which changes no training
