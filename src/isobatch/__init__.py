"""isobatch: you state the effective batch; the hardware plan is free."""

from isobatch.extend.registry import register
from isobatch.given import Sum

__all__ = ["Sum", "register"]
__version__ = "0.1.0"
