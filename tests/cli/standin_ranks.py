"""standin.run_job for several ranks: brings torch, as the real one does, so that the fork server imports it once."""

import torch  # noqa: F401
from standin import run_job

__all__ = ["run_job"]
