"""isobatch: you state the effective batch; the hardware plan is free."""

__version__ = "0.1.0"
