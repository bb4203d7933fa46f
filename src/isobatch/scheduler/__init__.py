"""Group `scheduler`: the learning rate as a pure function of `update` (and, for `plateau`, of what evaluations said).

The total is known before training from the dataset's size and the effective batch alone.
"""

from __future__ import annotations

from typing import Any

from isobatch.marks import Marks
from isobatch.scheduler.of_timm import TimmScheduler
from isobatch.scheduler.plateau import Plateau
from isobatch.scheduler.schedule import Factors, Schedule
from isobatch.scheduler.shapes import Cosine, OneCycle, Poly, Shape, Step, Tanh, Wsd

__all__ = ["MARKS", "TABLE", "Factors", "Schedule"]
TABLE: dict[str, Any] = {"constant": Shape, "cosine": Cosine, "onecycle": OneCycle, "plateau": Plateau, "poly": Poly,
                         "step": Step, "tanh": Tanh, "timm": TimmScheduler, "wsd": Wsd}  # fmt: skip
MARKS = Marks()
