"""timm, without the wandb that it imports for its own training script: a second of every rank's start.

Everything here that needs timm imports it through this file, since any may be the first.
"""

from __future__ import annotations

import sys

_hide = "wandb" not in sys.modules
if _hide:
    sys.modules["wandb"] = None  # type: ignore[assignment]
try:
    import timm
    import timm.loss
    import timm.optim
    import timm.scheduler
    import timm.utils
finally:
    if _hide:
        del sys.modules["wandb"]

__all__ = ["timm"]
