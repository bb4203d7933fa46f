"""How the samples of several shards lie in one batch, so that each shard can be told apart at little or no cost.

Interleaved, sample j of k shards' g-th one stands at j * k + g: then a contiguous (s * k, C, H, W) *is* (s, k * C, H, W), and
batch norm's own kernel takes every shard for itself (see norm.py). Blocked, shard follows shard: then each is a contiguous
piece, which is what channels_last tensors need, since they have no such view.

A tensor may have several rows per sample (tokens, windows, views), as long as a sample's rows follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The shards of one forward.

    Args:
        sizes: samples of each shard, at least one. Interleaved they take at most two values, the larger first.
    """

    sizes: tuple[int, ...]
    interleaved: bool = True

    @cached_property
    def samples(self) -> int:
        return sum(self.sizes)

    @property
    def even(self) -> bool:
        """Whether all shards have the same size."""
        return self.sizes[0] == self.sizes[-1]

    def times(self, rows: int) -> Layout:
        """The layout of a batch in which every sample became `rows` samples of its shard."""
        return self if rows == 1 else Layout(tuple(rows * size for size in self.sizes), self.interleaved)

    def rows(self, length: int) -> int:
        """Rows of each sample in a dimension of `length`; 0 where it cannot be one of samples."""
        return 0 if length % self.samples else length // self.samples

    def split(self, batch: Tensor) -> list[Tensor]:
        """The rows of each shard, in the order in which the shard alone would have them. Views, wherever there are any."""
        rows, shards = self.rows(len(batch)), len(self.sizes)
        if shards == 1:
            return [batch]
        if not self.interleaved:
            return list(batch.split([size * rows for size in self.sizes]))
        size = self.sizes[-1]
        parts = self._dealt(batch, size, shards, rows)
        if self.even:
            return parts
        longer = sum(n > size for n in self.sizes)
        rest = self._dealt(batch[size * shards * rows :], self.sizes[0] - size, longer, rows)
        return [*(_cat([a, b]) for a, b in zip(parts, rest, strict=False)), *parts[longer:]]

    @staticmethod
    def _dealt(batch: Tensor, size: int, shards: int, rows: int) -> list[Tensor]:
        """The first size * shards samples, dealt out in turn."""
        dealt = batch[: size * shards * rows].unflatten(0, (size, shards, rows)).unbind(1)
        return [part.flatten(0, 1) for part in dealt] if rows > 1 else [part.squeeze(1) for part in dealt]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """One batch of the rows of each shard: `split` undone."""
        if len(parts) == 1:
            return parts[0]
        if not self.interleaved:
            return _cat(parts)
        size, rows = self.sizes[-1], len(parts[-1]) // self.sizes[-1]
        whole = self._mixed([part[: size * rows] for part in parts], rows)
        if self.even:
            return whole
        longer = [part[size * rows :] for part, n in zip(parts, self.sizes, strict=True) if n > size]
        return _cat([whole, self._mixed(longer, rows)])

    @staticmethod
    def _mixed(parts: Sequence[Tensor], rows: int) -> Tensor:
        import torch

        if rows > 1:
            parts = [part.unflatten(0, (-1, rows)) for part in parts]
        mixed = torch.stack(list(parts), 1)
        return reshaped(mixed, (-1, *mixed.shape[2 + (rows > 1) :]))


def reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """`tensor`, which nobody else has, in another shape, and not as a view: what is done in place to it is no news to autograd,
    which fully_shard's hooks could not bear."""
    import torch

    whole = tensor.contiguous()  # a stack of channels_last is channels_last_3d
    return torch.ops.aten._unsafe_view(whole, shape)  # type: ignore[no-any-return]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.cat(list(parts))


@dataclass(frozen=True)
class Lanes:
    """The shards of one micro step: those of each device's forward, device after device."""

    layouts: tuple[Layout, ...]

    @staticmethod
    def alone(sizes: Sequence[int]) -> Lanes:
        """A shard on each device."""
        return Lanes(tuple(Layout((size,)) for size in sizes))

    @property
    def shared(self) -> bool:
        """Whether any device holds several shards."""
        return len(self.sizes) > len(self.layouts)

    def times(self, rows: int) -> Lanes:
        return self if rows == 1 else Lanes(tuple(layout.times(rows) for layout in self.layouts))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for layout in self.layouts for size in layout.sizes)

    @cached_property
    def samples(self) -> int:
        return sum(self.sizes)

    def chunks(self, batch: Tensor) -> list[Tensor]:
        """The rows of each device."""
        if len(self.layouts) == 1:
            return [batch]
        rows = len(batch) // self.samples
        return list(batch.split([rows * layout.samples for layout in self.layouts]))

    def split(self, batch: Tensor) -> list[Tensor]:
        """The rows of each shard."""
        chunks = zip(self.layouts, self.chunks(batch), strict=True)
        return [part for layout, chunk in chunks for part in layout.split(chunk)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """One batch of the rows of each shard: `split` undone."""
        left = list(parts)
        chunks = []
        for layout in self.layouts:
            count = len(layout.sizes)
            chunks.append(layout.join(left[:count]))
            del left[:count]
        return chunks[0] if len(chunks) == 1 else _cat(chunks)
