"""One forward, the same in a step, an evaluation, a prediction, a rehearsal and a trial of memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from isobatch.precision.masters import to_fp32
from isobatch.runtime.trees import call


def forward(module: Callable[..., Any], inputs: Any, under: AbstractContextManager[Any]) -> Any:
    """What a criterion gets: the output of `module` for `inputs` (any tree), its half tensors as fp32.

    Args:
        under: the level's `autocast` in training, its `evaluation` elsewhere. The criterion is outside of it.
    """
    with under:
        return to_fp32(call(module, inputs))
