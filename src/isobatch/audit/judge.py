"""Whose bits are off: a majority decides, and where there is none, whoever repeats his own result unlike before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Suspects:
    """
    Args:
        ranks: whose bits are off; all that disagree where nothing decides.
        certain: a majority, or a repetition, has decided.
        apart: numbers of the compared things (tensors, say) that differ, in the order in which one follows from another.
    """

    ranks: tuple[int, ...]
    certain: bool
    apart: tuple[int, ...]


@dataclass(frozen=True)
class RankDigests:
    """What a rank has: digests of things in their order."""

    rank: int
    digests: tuple[int, ...]


def judge(results: Sequence[RankDigests], order: Sequence[int] = ()) -> Suspects | None:
    """Several results for one and the same thing; None if all agree.

    What more than half of them say is right, and who has ever said something else is off (a fault that passes differs once
    and is right again). Without a majority nobody can tell.

    Args:
        order: in which things follow from one another, as far as it is not that of their numbers.
    """
    size = max(len(r.digests) for r in results)
    if any(len(r.digests) != size for r in results):
        apart = list(range(size))  # another number of things: nothing is comparable
    else:
        apart = [i for i in range(size) if len({r.digests[i] for r in results}) > 1]
    if not apart:
        return None
    named = [i for i in order if i in apart]
    parted = (*named, *(i for i in apart if i not in named))
    said, count = Counter(r.digests for r in results).most_common(1)[0]
    if 2 * count > len(results):
        return Suspects(tuple(sorted({r.rank for r in results if r.digests != said})), True, parted)
    return Suspects(tuple(sorted({r.rank for r in results})), False, parted)


@dataclass(frozen=True)
class Accusation:
    """Plain data, so that ranks can tell it to each other.

    Args:
        of: what was computed; "" = nothing: it is about what the ranks hold.
        first: what differs first, in words.
    """

    suspects: Suspects
    of: str
    first: str

    @property
    def state(self) -> bool:
        return not self.of

    def line(self, step: int, places: list[dict[str, str]]) -> str:
        who = " and ".join(f"rank {r} (host {places[r]['host']}, {places[r]['device']})" for r in self.suspects.ranks)
        if self.state:
            what = f"{self.first} is the first tensor that differs"
            if self.suspects.certain:
                return f"audit: before step {step}, {who} holds other bits than the other ranks; {what}"
            return (f"audit: before step {step}, {who} hold different bits, and there is no majority; {what}; "
                    "task=replay of this run from its last checkpoint tells which is right")  # fmt: skip
        what = f"first in {self.first}"
        if self.suspects.certain:
            return f"audit: {who} computed bits {self.of} of step {step} that do not come out again, {what}"
        return f"audit: {who} insist on different bits {self.of} of step {step}, {what}; nobody can tell which is right"
