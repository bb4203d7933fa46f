"""Digests of tensors and of a whole training state: 64 bits each, so that what one rank holds can be compared with another's.

A tensor's bytes are taken as words of 64 bits. Each is mixed one to one and multiplied with an odd number of its place, and
the sum of all, modulo 2^64, is the digest. Sums of integers depend on neither order nor grouping, so a CPU and a GPU give the
same; a change within one word always shows, and of several words but for a chance of about 2^-32 at worst (two flipped signs)
and 2^-64 in general. Tensors are looked at in small pieces where they lie: no copy of a model is made, and the host waits
once, when `values` reads all of them.

It guards against faults, not against forgers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobatch.runtime.dtensor import whole

if TYPE_CHECKING:
    from isobatch.train.state import TrainState

PIECE = 1 << 16  # words of 64 bits of one piece: half a MiB, which stays in a core's cache
AT_ONCE = 32  # pieces that are mixed at once where a kernel's launch costs more than its work
STRIDE = -7046029254386353131  # 2^64 over the golden ratio: numbers that are near each other become far apart
MIX = -4658895280553007687  # odd, of splitmix64
LOW = (1 << 32) - 1
NAN = -1.25  # any NaN is as good as another: which of them a kernel makes is not promised
WITH_NAN = torch.float32, torch.float16, torch.bfloat16, torch.float64


class Digests:
    """Digests of tensors that come one after another, each at its place; 0 where there is none."""

    def __init__(self, places: int):
        self.places = places
        self.parts: dict[torch.device, list[tuple[list[int], Tensor]]] = {}
        self.pending: list[tuple[int, Tensor]] = []
        self.words = 0
        self.sizes: list[tuple[int, int]] = []

    def add(self, place: int, tensor: Tensor | None) -> None:
        """Small ones wait for others: `flush` before a tensor's memory is used for something else."""
        if tensor is None or not tensor.numel():
            return
        tensor = plain(tensor)
        words = _words(tensor)
        self.sizes.append((place, tensor.numel()))
        if words > PIECE // 4:
            self._keep([place], _large(tensor))
            return
        if self.pending and (self.pending[0][1].device != tensor.device or self.words + words > PIECE):
            self.flush()
        self.pending.append((place, tensor))
        self.words += words

    def flush(self) -> None:
        """Digest what waits."""
        if self.pending:
            self._keep([place for place, _ in self.pending], _small([tensor for _, tensor in self.pending]))
            self.pending, self.words = [], 0

    def _keep(self, places: list[int], values: Tensor) -> None:
        self.parts.setdefault(values.device, []).append((places, values))

    def values(self) -> list[int]:
        """All of them, signed. Waits for each device once."""
        self.flush()
        found = [0] * self.places
        for parts in self.parts.values():
            places = [place for some, _ in parts for place in some]
            for place, value in zip(places, torch.cat([values for _, values in parts]).tolist(), strict=True):
                found[place] = value
        for place, size in self.sizes:  # zeros add nothing, however many there are
            found[place] = wrapped(found[place] + size * STRIDE)
        return found


def plain(tensor: Tensor) -> Tensor:
    """(n,) real values in the tensor's own order, however they lie in memory."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1)


def wrapped(number: int) -> int:
    """`number` modulo 2^64, signed."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _words(flat: Tensor) -> int:
    return -(-flat.numel() * flat.element_size() // 8)


_memory: dict[tuple[torch.device, str], Tensor] = {}


def forget() -> None:
    """Give back what digests work in."""
    _memory.clear()


def _pieces(device: torch.device) -> int:
    return 1 if device.type == "cpu" else AT_ONCE


def _scratch(device: torch.device, purpose: str) -> Tensor:
    """Memory for the words of `_pieces`, int64, the same at each call. Digests are made one at a time."""
    key = device, purpose
    if key not in _memory:
        _memory[key] = torch.empty(_pieces(device) * PIECE, dtype=torch.int64, device=device)
    return _memory[key]


def _weights(device: torch.device) -> Tensor:
    """(PIECE,) odd numbers, one for each place."""
    key = device, "weights"
    if key not in _memory:
        places = torch.arange(1, PIECE + 1, dtype=torch.int64, device=device).mul_(STRIDE)
        _memory[key] = _spread(places.mul_(MIX), torch.empty_like(places)).mul_(STRIDE).bitwise_or_(1)
    return _memory[key]


def _spread(values: Tensor, spare: Tensor) -> Tensor:
    """Bring the upper halves into the lower ones, in place, one to one."""
    torch.bitwise_right_shift(values, 32, out=spare).bitwise_and_(LOW)
    return values.bitwise_xor_(spare)


def _put(values: Tensor, words: Tensor) -> None:
    """Copy `values` (n,) to the beginning of `words` (int64), and zeros behind them."""
    where = words.view(values.dtype)
    here = where[: values.numel()]
    if values.dtype in WITH_NAN:
        torch.nan_to_num(values, NAN, torch.inf, -torch.inf, out=here)
    else:
        here.copy_(values)
    if values.numel() < where.numel():
        where[values.numel() :].zero_()


def _mixed(values: Tensor, weights: Tensor) -> Tensor:
    """`values` (n,), in place: to be added up. Weights (n,), or of a piece for each."""
    _spread(values.mul_(MIX), _scratch(values.device, "spare")[: len(values)]).view(-1, len(weights)).mul_(weights)
    return values


def _large(flat: Tensor) -> Tensor:
    """(1,)."""
    device, each = flat.device, 8 // flat.element_size()
    total, values, weights = torch.zeros(1, dtype=torch.int64, device=device), _scratch(device, "values"), _weights(device)
    length = _pieces(device) * PIECE * each
    for begin in range(0, flat.numel(), length):
        some = flat[begin : begin + length]
        count = -(-_words(some) // PIECE)
        words = values[: count * PIECE]
        _put(some, words)  # zeros behind the last one add nothing
        first = begin // (PIECE * each)
        sums = _mixed(words, weights).view(count, PIECE).sum(1)
        if count == 1:  # pieces are weighted, too
            total += sums.mul_(wrapped(2 * first * STRIDE + 1))
        else:
            numbers = torch.arange(first, first + count, device=device)
            total += sums.mul_(numbers.mul_(wrapped(2 * STRIDE)).add_(1)).sum()
    return total


def _small(flats: list[Tensor]) -> Tensor:
    """(len(flats),) of tensors on one device, of any types, that have at most PIECE words together."""
    device, weights = flats[0].device, _weights(flats[0].device)
    values = _scratch(device, "values")
    sizes, begin = [_words(flat) for flat in flats], 0
    for flat, size in zip(flats, sizes, strict=True):
        _put(flat, values[begin : begin + size])
        begin += size
    if len(flats) == 1:
        return _mixed(values[:begin], weights[:begin]).sum().reshape(1)
    sums = _mixed(values[:begin], torch.cat([weights[:size] for size in sizes])).cumsum(0)
    ends = sums[torch.tensor(sizes, device=device).cumsum(0) - 1]
    return torch.cat([ends[:1], ends.diff()])


def of(tensors: Iterable[Tensor | None]) -> list[int]:
    """A digest of each."""
    every = list(tensors)
    found = Digests(len(every))
    for place, tensor in enumerate(every):
        found.add(place, tensor)
    return found.values()


def together(digests: Iterable[int]) -> int:
    """One of many, in their order."""
    (found,) = of([torch.tensor(list(digests), dtype=torch.int64)])
    return found


def text(number: int) -> str:
    """16 hexadecimal digits."""
    return f"{number & ((1 << 64) - 1):016x}"


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) of a nest of mappings and sequences; mappings in the order of their keys' text."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from leaves(inner, f"{name}.{place}")
    else:
        yield name, value


def parts_of(state: TrainState) -> Iterator[tuple[str, Any]]:
    """(name, tensor or plain data) of all that training goes on from: weights, optimizer, EMA, scaler, reducer, counters.

    The optimizer's tensors bear the name of their parameter. What no update reads (best metrics, the logger's run) is left out.
    """
    names = {id(p): name for name, p in state.model.named_parameters()}
    yield from leaves(state.model.state_dict(), "model")
    # in the model's order: an optimizer lists a parameter when it first has a gradient
    entries = {names.get(id(p), f"{n}"): entry for n, (p, entry) in enumerate(state.optimizer.state.items())}
    yield from leaves(entries, "optimizer")
    if state.ema is not None:
        yield from leaves(state.ema.module.state_dict(), "ema")
    yield "scaler", state.scaler.state_dict()
    yield "reducer", {} if state.reducer is None else state.reducer.state_dict()
    yield "counters", [state.step, state.update, state.skipped_steps, state.samples]


class StateDigest:
    """Digests of a training state, under way on the devices until they are read. Weights that are spread over ranks are
    gathered one after another: then a collective."""

    def __init__(self, parts: Iterable[tuple[str, Any]]):
        self.names: list[str] = []
        self.said: dict[int, int] = {}
        found = Digests(0)
        for place, (name, leaf) in enumerate(parts):
            self.names.append(name)
            if isinstance(leaf, Tensor):
                found.add(place, whole(leaf))
            else:
                self.said[place] = of_plain(leaf)
        found.flush()
        found.places = len(self.names)
        self.found = found

    def values(self) -> list[int]:
        """One for each name."""
        values = self.found.values()
        for place, value in self.said.items():
            values[place] = value
        return values


def of_plain(value: Any) -> int:
    """Of what JSON can say, or else of its text."""
    said = json.dumps(value, sort_keys=True, default=str).encode()
    return int.from_bytes(blake2b(said, digest_size=8).digest(), "little", signed=True)
