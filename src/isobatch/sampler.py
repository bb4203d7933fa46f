"""Group `sampler`: the order of an epoch. It knows neither ranks nor batches: the cut is batch_plan's alone.

`order(epoch)` gives int64 positions -> *virtual* indices: sample + n * occurrence, n the dataset's size. The occurrence
tells repeats of a sample within an epoch apart, so that each gets its own augmentation on every hardware plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.checks import LARGEST, choice, positive
from isobatch.errors import ConfigError
from isobatch.marks import Marks

if TYPE_CHECKING:
    from torch import Tensor

    from isobatch.permutation import ComputedOrder

TAILS = ("keep", "drop", "pad")
MOST_CATEGORIES = 2**24  # that torch.multinomial takes
MOST_DRAWS = 2**40  # of an epoch; its steps have to be countable


@dataclass(frozen=True)
class Sampler:
    """What all of them share: the rule for the tail, and epochs as long as the dataset of `n` samples.

    Args:
        passes: over the data in one epoch, each in an order of its own: epochs of a small data set become worth an evaluation.
    """

    name: str = ""
    tail: str = "keep"
    passes: int = 1

    def __post_init__(self) -> None:
        choice("sampler.tail", self.tail, TAILS)
        positive("sampler.passes", self.passes)

    def order_size(self, n: int) -> int:
        return self.passes * self.pass_size(n)

    def order(self, epoch: int, n: int, seed: int, targets: Callable[[], Tensor]) -> Tensor | ComputedOrder:
        """Virtual indices of one epoch, (order_size(n),) int64; a pure function of its arguments."""
        if self.passes == 1:
            return self.one_pass(epoch, n, seed, targets)
        import torch

        found, shift = [], 0
        for k in range(self.passes):
            found.append(self.one_pass(epoch * self.passes + k, n, seed, targets) + shift)
            shift = (int(found[-1].max()) // n + 1) * n  # a sample's occurrences go on counting
        return torch.cat(found)

    def pass_size(self, n: int) -> int:
        return n

    def one_pass(self, number: int, n: int, seed: int, targets: Callable[[], Tensor]) -> Tensor:
        """Virtual indices of pass `number`, (pass_size(n),) int64; a pure function of its arguments."""
        raise AssertionError("a sampler defines one_pass")


@dataclass(frozen=True)
class Shuffle(Sampler):
    """Bit for bit the permutation of torch.utils.data.DistributedSampler(shuffle=True, seed=seed) for that epoch."""

    name: str = "shuffle"

    def one_pass(self, number: int, n: int, seed: int, targets: Callable[[], Tensor]) -> Tensor:
        import torch

        return torch.randperm(n, generator=torch.Generator().manual_seed(seed + number))


@dataclass(frozen=True)
class Sequential(Sampler):
    """The dataset's own order, in every epoch."""

    name: str = "sequential"

    def one_pass(self, number: int, n: int, seed: int, targets: Callable[[], Tensor]) -> Tensor:
        import torch

        return torch.arange(n)


@dataclass(frozen=True)
class Weighted(Sampler):
    """Drawn with replacement so that every class is equally likely; `samples` an epoch (null: the dataset's size)."""

    name: str = "weighted"
    samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None:
            positive("sampler.samples", self.samples, MOST_DRAWS)
            if self.samples > LARGEST:
                raise ConfigError("sampler.samples", self.samples, "is more than a table of draws holds",
                                  "set sampler=computed sampler.balanced=true, which needs no table")  # fmt: skip

    def pass_size(self, n: int) -> int:
        return self.samples or n

    def one_pass(self, number: int, n: int, seed: int, targets: Callable[[], Tensor]) -> Tensor:
        import torch

        weights = _class_weights(self.name, targets())
        generator = torch.Generator().manual_seed(seed + number)
        if n <= MOST_CATEGORIES:
            drawn = torch.multinomial(weights, self.pass_size(n), replacement=True, generator=generator)
        else:
            sums = weights.cumsum(0)
            places = torch.rand(self.pass_size(n), dtype=torch.float64, generator=generator) * sums[-1]
            drawn = torch.searchsorted(sums, places, right=True).clamp_(max=n - 1)
        return drawn + n * _occurrence(drawn)


@dataclass(frozen=True)
class Repeated(Sampler):
    """Repeated augmentation (Hoffer et al. 2020): each shuffled sample `repeats` times in a row, in one window.

    Every epoch reads n/`repeats` different samples, so that an epoch stays n long, as in DeiT's recipe.
    """

    name: str = "repeated"
    repeats: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("sampler.repeats", self.repeats)

    def one_pass(self, number: int, n: int, seed: int, targets: Callable[[], Tensor]) -> Tensor:
        import torch

        base = torch.randperm(n, generator=torch.Generator().manual_seed(seed + number))
        position = torch.arange(n)
        return base[position // self.repeats] + n * (position % self.repeats)


@dataclass(frozen=True)
class Blocks(Sampler):
    """Shuffled in blocks, for data that is slow to jump about in (tars on a spinning disk or a remote file system).

    The blocks of neighbouring samples come in a random order, and the samples of each `mix` blocks in a row are shuffled among
    themselves: at any time only `mix` stretches of the data are read.

    Args:
        block: samples of a block; the last one may be shorter.
        mix: blocks that are shuffled together; 1 shuffles within each block alone.
    """

    name: str = "blocks"
    block: int = 1024
    mix: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("sampler.block", self.block)
        positive("sampler.mix", self.mix)

    def one_pass(self, number: int, n: int, seed: int, targets: Callable[[], Tensor]) -> Tensor:
        import torch

        generator = torch.Generator().manual_seed(seed + number)
        blocks = torch.arange(n).split(self.block)
        chosen = torch.randperm(len(blocks), generator=generator).tolist()
        groups = [torch.cat([blocks[b] for b in chosen[k : k + self.mix]]) for k in range(0, len(chosen), self.mix)]
        return torch.cat([group[torch.randperm(len(group), generator=generator)] for group in groups])


@dataclass(frozen=True)
class Computed(Sampler):
    """Shuffled by a formula and not by a table, for data sets of any size: an epoch's order takes neither time nor memory
    before it is read, and a resume starts anywhere in it. Another order than shuffle's.

    Args:
        balanced: drawn with replacement instead, so that every class is equally likely, as sampler=weighted does.
        samples: of an epoch, with `balanced` (null: the dataset's size).
    """

    name: str = "computed"
    balanced: bool = False
    samples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None:
            positive("sampler.samples", self.samples, MOST_DRAWS)
            if not self.balanced:
                raise ConfigError("sampler.samples", self.samples, "is the length of an epoch that is drawn, and none is",
                                  "set sampler.balanced=true, or sampler.samples=null")  # fmt: skip

    def pass_size(self, n: int) -> int:
        if self.samples is not None and n * self.samples * self.passes >= 2**63:  # a draw's number: sample and place
            raise ConfigError("sampler.samples", self.samples, f"are more draws of {n:,} samples than 64 bits number",
                              f"set at most {(2**63 - 1) // (n * self.passes)}")  # fmt: skip
        return self.samples or n

    def order(self, epoch: int, n: int, seed: int, targets: Callable[[], Tensor]) -> ComputedOrder:
        from isobatch.permutation import ComputedOrder, Draws, Passes, Permutation

        size, first = self.pass_size(n), epoch * self.passes
        if not self.balanced:
            values = Passes(lambda k: Permutation(n, seed, first + k), size, n)
            return ComputedOrder(values, self.order_size(n), n * self.passes)
        sums = _class_weights(self.name, targets()).cumsum(0).numpy()
        values = Passes(lambda k: Draws(sums, seed, first + k), size, n * size)
        return ComputedOrder(values, self.order_size(n), n * self.order_size(n))


def _class_weights(name: str, labels: Tensor) -> Tensor:
    """(N,) float64: one over the size of the sample's class.

    Raises:
        ConfigError: the labels are no classes.
    """
    import torch

    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise ConfigError("sampler.name", name, "needs class labels, which this dataset does not have",
                          "set sampler=shuffle")  # fmt: skip
    return 1.0 / torch.bincount(labels).double()[labels]


def _occurrence(drawn: Tensor) -> Tensor:
    """How often each value stood earlier in `drawn` (N,) -> (N,)."""
    import torch

    by_value = torch.argsort(drawn, stable=True)
    grouped = drawn[by_value]
    starts = torch.ones_like(grouped, dtype=torch.bool)
    starts[1:] = grouped[1:] != grouped[:-1]
    position = torch.arange(len(drawn))
    first = torch.cummax(torch.where(starts, position, torch.zeros_like(position)), 0).values
    occurrence = torch.empty_like(drawn)
    occurrence[by_value] = position - first
    return occurrence


TABLE: dict[str, Any] = {
    "shuffle": Shuffle,
    "sequential": Sequential,
    "weighted": Weighted,
    "repeated": Repeated,
    "blocks": Blocks,
    "computed": Computed,
}
MARKS = Marks()
