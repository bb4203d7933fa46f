"""Operations that the device has no deterministic kernel for, named before the first update.

Under `reduction=exact` on CUDA torch takes its deterministic kernels wherever it has some, and warns of the others when they
are first run (`hardware.set_up`). What it warns of while a shard is looked at, forward and backward, becomes one line each:
the promise does not cover it. With `deterministic=true` torch refuses them by itself.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from isobatch.errors import JobFailed
from isobatch.run_folder.files import RunFiles
from isobatch.runtime.distributed import Ranks

if TYPE_CHECKING:
    from isobatch.train.state import TrainState
    from isobatch.train.step import Parts

log = logging.getLogger("isobatch")
Question = Callable[["TrainState", "Parts", Iterator[Any]], Iterator[Any]]

WARNS = 1  # torch.get_deterministic_debug_mode: it takes what is deterministic and warns of the rest
ABOUT = re.compile(r"(?P<attention>[\w ]+? Attention) defaults to a non-deterministic algorithm"
                   r"|(?P<operation>\S.*?) does not have a deterministic implementation", re.IGNORECASE)  # fmt: skip


def named(message: str) -> str | None:
    """What a warning of torch is about, in a person's words; None: something else."""
    found = ABOUT.search(message)
    if found is None:
        return None
    if found["attention"]:
        kind = found["attention"].removesuffix("ttention").removesuffix(" A").removesuffix(" a")
        return f"the backward of attention ({kind}) has an order of its own; deterministic=true takes its deterministic kernel"
    return f"{found['operation']} has no deterministic kernel; deterministic=true refuses it"


def heard(question: Question | None, ranks: Ranks, files: RunFiles) -> Question | None:
    """`question` (Loop.audit: it runs a shard before the first step), and afterwards a line for each operation it met."""
    if question is None or torch.get_deterministic_debug_mode() != WARNS:
        return question

    def asked(state: TrainState, parts: Parts, windows: Iterator[Any]) -> Iterator[Any]:
        always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)  # also of what an earlier job of this process was told
        failure = None
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                windows = question(state, parts, windows)
        except JobFailed as error:  # on all ranks alike, as every answer of the question
            failure = error
        finally:
            torch.set_warn_always(always)
        log_once([str(warning.message) for warning in said], ranks, files)
        if failure is not None:
            raise failure
        return windows

    return asked


def log_once(messages: list[str], ranks: Ranks, files: RunFiles) -> None:
    """Each operation once, for all ranks, in the log and in plan.json; torch need not say it again. A collective."""
    for message in messages:
        if named(message):  # of the rest of the run; another operation is still warned of
            warnings.filterwarnings("ignore", message=re.escape(message[:80]))
    found = ranks.gather_objects(sorted({line for line in map(named, messages) if line}))
    if found is None or not (lines := sorted({line for each in found for line in each})):
        return
    files.plan_also({"not_deterministic": lines})
    for line in lines:
        log.warning("reduction=exact: %s", line)
