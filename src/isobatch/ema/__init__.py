"""Group `ema`: an exponential moving average of the weights, counted in updates."""

from __future__ import annotations

from typing import Any

from isobatch.ema.options import MARKS, Ema, NoEma, Swa

__all__ = ["MARKS", "TABLE"]
TABLE: dict[str, Any] = {"none": NoEma, "ema": Ema, "swa": Swa}
