"""What a criterion gives: a mean over samples, a `Sum` over elements, or a mapping of one of these and named numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sum:
    """A loss whose weight is its number of elements: tokens, valid pixels, boxes.

    A window's gradient is then the sum of all totals over the sum of all counts, whatever shards and ranks it was cut into:
    what the whole window in one forward gives.

    Args:
        total: 0-d, the sum over the elements.
        count: how many they are, a number or 0-d, >= 0; of weighted elements the sum of their weights.
    """

    total: Tensor
    count: Tensor | float


class Given(NamedTuple):
    """A criterion's result, taken apart. `elements` None: `value` is a mean over the samples (or what the loss says it is)."""

    value: Tensor
    elements: Tensor | float | None
    named: dict[str, Any]


def taken_apart(result: Any) -> Given:
    """
    Raises:
        TypeError: a mapping without `loss`.
    """
    named: dict[str, Any] = {}
    if isinstance(result, Mapping):
        named = {str(name): value for name, value in result.items() if name != "loss"}
        if "loss" not in result:
            raise TypeError(f"a mapping has to hold `loss`, this one holds {', '.join(named) or 'nothing'}")
        result = result["loss"]
    return Given(result.total, result.count, named) if isinstance(result, Sum) else Given(result, None, named)


def together(results: list[Any], factors: list[float]) -> Any:
    """One result of those of several shards: sums are added, means are weighted by `factors`."""
    found = [taken_apart(result) for result in results]
    loss = _added([r.value if r.elements is None else Sum(r.value, r.elements) for r in found], factors)
    names = found[0].named
    if any(r.named.keys() != names.keys() for r in found):
        raise TypeError("the shards of a forward name different numbers")
    return {"loss": loss, **{name: _added([r.named[name] for r in found], factors) for name in names}} if names else loss


def _added(values: list[Any], factors: list[float]) -> Any:
    if isinstance(values[0], Sum):
        return Sum(sum(v.total for v in values), sum(v.count for v in values))
    return sum(value * factor for value, factor in zip(values, factors, strict=True))


def mean_of(result: Any) -> Any:
    """The loss of these samples alone, 0-d; 0 where it is a Sum over nothing."""
    value, count, _ = taken_apart(result)
    if count is None:
        return value
    return value / count.clamp(min=1e-30) if hasattr(count, "clamp") else value / max(count, 1e-30)
