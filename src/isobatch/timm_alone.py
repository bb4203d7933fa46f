"""timm, without the wandb that it imports for its own training script: a second of every rank's start.

The places that may be the first to import timm, the model and the augmentation's policies, do it through here.
"""

from __future__ import annotations

import sys

_hide = "wandb" not in sys.modules
if _hide:
    sys.modules["wandb"] = None  # type: ignore[assignment]
try:
    import timm
finally:
    if _hide:
        del sys.modules["wandb"]

__all__ = ["timm"]
