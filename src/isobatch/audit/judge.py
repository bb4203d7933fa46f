"""Whose bits are off: a majority decides, and where there is none, whoever repeats his own result unlike before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Suspects:
    """Who gave other bits than the others, and where they part first.

    Args:
        ranks: whose bits are off; all that disagree where nothing decides.
        certain: a majority, or a repetition, has decided.
        name: the first of the compared things (a tensor, say) that differs, in the order in which they were given.
    """

    ranks: tuple[int, ...]
    certain: bool
    name: str


def majority(digests: Mapping[int, str]) -> tuple[str | None, tuple[int, ...]]:
    """(the digest that more than half of the ranks have or None, the ranks that have another)."""
    value, count = Counter(digests.values()).most_common(1)[0]
    if 2 * count > len(digests):
        return value, tuple(rank for rank, digest in sorted(digests.items()) if digest != value)
    return None, tuple(sorted(digests))


def compare_states(states: Sequence[Mapping[str, str]]) -> Suspects | None:
    """The state digests of all ranks (rank -> name -> digest), which have to be equal; None if they are."""
    for name in states[0]:
        digests = {rank: state.get(name, "") for rank, state in enumerate(states)}
        if len(set(digests.values())) > 1:
            decided, off = majority(digests)
            return Suspects(off, decided is not None, name)
    return None


@dataclass(frozen=True)
class Computation:
    """One computation of a shard: by which rank, and name -> digest of its loss, statistics and gradients."""

    rank: int
    digests: Mapping[str, str]


def judge(computations: Sequence[Computation]) -> Suspects | None:
    """Several computations of one shard, at first the training's own and an auditor's; None if all agree.

    With a majority among them, who differs from it is off (a transient fault differs once and is right again). Without
    one, ranks that agree with themselves and not with each other, nobody can tell.
    """
    first = computations[0].digests
    name = next((n for n in first if any(c.digests.get(n) != first[n] for c in computations)), None)
    if name is None:
        return None
    whole = [tuple(sorted(c.digests.items())) for c in computations]
    value, count = Counter(whole).most_common(1)[0]
    if 2 * count > len(whole):
        off = {c.rank for c, digests in zip(computations, whole, strict=True) if digests != value}
        return Suspects(tuple(sorted(off)), True, name)
    return Suspects(tuple(sorted({c.rank for c in computations})), False, name)
