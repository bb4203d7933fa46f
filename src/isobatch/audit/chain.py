"""`audit/state`: a chain of digests over weights, optimizer, EMA, scaler and counters, the same on every plan.

Each link holds the one before, so that equal links mean equal states at all links before, too. All ranks compare theirs:
a bit that flipped in one rank's memory, or an update that went wrong there, is found at the next link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobatch.audit import digest
from isobatch.audit.judge import Suspects, compare_states

if TYPE_CHECKING:
    from isobatch.runtime.distributed import Ranks
    from isobatch.train.state import TrainState


def due(step: int, every: int, log_every: int) -> bool:
    """Whether the logged step `step` is the first at or after a multiple of `every`: the same steps on every plan and resume."""
    return step // every > max(0, step - log_every) // every


def add_link(state: TrainState, ranks: Ranks) -> Suspects | None:
    """Append a link to `state.audit_chain`; returns who is off, on every rank alike. A collective.

    Weights that are spread over ranks have no state of their own to compare: of them every rank links its own part.
    """
    mine = digest.of_state(state)
    state.audit_chain = digest.of_all([state.audit_chain, *mine.values()])
    if ranks.world_size == 1:
        return None
    chains: list[Any] = ranks.broadcast_object(ranks.gather_objects(state.audit_chain))
    if len(set(chains)) == 1:
        return None
    return ranks.broadcast_object(_compared(ranks.gather_objects(mine)))  # type: ignore[no-any-return]


def _compared(states: list[Any] | None) -> Suspects | None:
    return None if states is None else compare_states(states)
