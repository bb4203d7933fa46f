"""isobatch: you state the effective batch; the hardware plan is free."""

from isobatch.extend.registry import register

__all__ = ["register"]
__version__ = "0.1.0"
