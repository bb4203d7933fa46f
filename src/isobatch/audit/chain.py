"""A chain of digests: of all that a training goes on from, each bound to the one before it.

Two runs whose links are equal at a step have the same weights, optimizer, average, scaler and counters there, to the bit, and
equal heads mean that all links before were equal too. Tensors are looked at where they lie (see digest.py): no copy is made.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from isobatch.audit import digest

if TYPE_CHECKING:
    from isobatch.train.state import TrainState


class Chain:
    """
    Args:
        every: steps from one link to the next; 0 = none but those of evaluations.
        evaluations: there is a link at each evaluation during the training.
    """

    def __init__(self, every: int = 0, evaluations: bool = False):
        self.every, self.evaluations = every, evaluations
        self.links, self.head = 0, ""

    def due(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    def link(self, state: TrainState) -> dict[str, str]:
        """What a row says of `state`, between two steps. Waits for the device; a collective where weights are spread."""
        found = digest.text(digest.together(digest.StateDigest(digest.parts_of(state)).values()))
        self.head = blake2b(f"{self.head} {state.step} {found}".encode(), digest_size=8).hexdigest()
        self.links += 1
        return {"audit/state": found, "audit/chain": self.head}

    def saw(self, result: dict[str, float]) -> None:
        """An evaluation's numbers decide nothing here."""

    def state_dict(self) -> dict[str, Any]:
        return {"links": self.links, "head": self.head} if self.links else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.links, self.head = int(state["links"]), str(state["head"])
