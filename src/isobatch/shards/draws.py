"""What functions of torch that draw random numbers do when several shards share a forward: each shard draws for itself.

A function is called once for each shard, on that shard's rows or for that shard's size, with the shard's own stream as the
default generator (streams.py): so it draws what it would draw for the shard alone, whatever it is. Which rows are a shard's
is told by the first dimension that can be one of samples.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isobatch.shards.streams import NotApart, Streams, device_of

Call = Callable[[Streams, Any, tuple[Any, ...], dict[str, Any]], Any]


def sample_dimension(streams: Streams, shape: Sequence[int], what: Any) -> int:
    """0, for one or more rows per sample, or 1, for sequences that come first.

    Raises:
        NotApart: neither can be one of samples.
    """
    layout = streams.layout
    if shape and layout.rows(shape[0]):
        return 0
    if len(shape) > 1 and shape[1] == layout.samples:
        return 1
    name = getattr(what, "__name__", str(what))
    raise NotApart(f"{name} draws {tuple(shape)} numbers, which are not so many for each of its {layout.samples} samples")


def shapes(streams: Streams, shape: Sequence[int], dim: int) -> list[tuple[int, ...]]:
    """What `shape` would be for each shard alone."""
    per_sample = shape[dim] // streams.layout.samples
    return [(*shape[:dim], size * per_sample, *shape[dim + 1 :]) for size in streams.layout.sizes]


def joined(streams: Streams, parts: Sequence[Tensor], dim: int) -> Tensor:
    if dim == 0:
        return streams.layout.join(parts)
    return streams.layout.join([part.transpose(0, dim) for part in parts]).transpose(0, dim)


def split(streams: Streams, batch: Tensor, dim: int) -> list[Tensor]:
    if dim == 0:
        return streams.layout.split(batch)
    return [part.transpose(0, dim) for part in streams.layout.split(batch.transpose(0, dim))]


def likes(streams: Streams, tensor: Tensor, dim: int) -> list[Tensor]:
    """Memory for each shard's part of `tensor`, laid out as it would be alone."""
    sizes = [shape[dim] for shape in shapes(streams, tensor.shape, dim)]
    return [torch.empty_like(tensor.narrow(dim, 0, size)) for size in sizes]


def from_default(kwargs: dict[str, Any]) -> bool:
    """Whether a call draws from the default generator; one that is given another keeps its own books."""
    return kwargs.get("generator") is None


def drop(streams: Streams, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dropout of any kind: zeros and factors are drawn for each shard, the product is taken of all at once."""
    x, p, training, inplace = of_dropout(*args, **kwargs)
    if not training or p in (0, 1) or not x.numel():  # draws nothing
        return func(*args, **kwargs)
    dim = sample_dimension(streams, x.shape, func)
    parts = likes(streams, x, dim)
    with torch.no_grad():
        if func in _ELEMENTWISE and x.device.type == "cpu":  # what torch does there, but for the product
            mask = joined(streams, streams.each(x.device, lambda i: parts[i].bernoulli_(1 - p)), dim).div_(1 - p)
        else:
            name = func.__name__.removesuffix("_")
            draw = getattr(F, name, None) or getattr(torch, name)
            mask = joined(streams, streams.each(x.device, lambda i: draw(parts[i].fill_(1), p, True)), dim)
    return x.mul_(mask) if inplace or func.__name__.endswith("_") else x * mask


def of_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *,
                train: bool | None = None) -> tuple[Tensor, float, bool, bool]:  # fmt: skip
    return input, p, training if train is None else train, inplace


def fill(streams: Streams, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x.bernoulli_(p), x.normal_() and the like: fills x, whatever was in it."""
    x = args[0]
    if not from_default(kwargs) or not x.numel():
        return func(*args, **kwargs)
    dim = sample_dimension(streams, x.shape, func)
    empty = likes(streams, x, dim)
    calls = _parts_of_call(streams, x.shape[dim], dim, args[1:], kwargs)
    parts = streams.each(x.device, lambda i: func(empty[i], *calls[i][0], **calls[i][1]))
    with torch.no_grad():
        return x.copy_(joined(streams, parts, dim))


def by_parts(streams: Streams, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """func(x, ...) for each shard's rows of x and of every other tensor that has as many."""
    x = args[0] if args else next(iter(kwargs.values()))
    if not from_default(kwargs) or not isinstance(x, Tensor) or not x.numel():
        return func(*args, **kwargs)
    if kwargs.get("out") is not None:
        raise NotApart(f"{func.__name__} draws into a tensor of its own (out=)")
    dim = sample_dimension(streams, x.shape, func)
    calls = _parts_of_call(streams, x.shape[dim], dim, args, kwargs)
    return joined(streams, streams.each(x.device, lambda i: func(*calls[i][0], **calls[i][1])), dim)


def _parts_of_call(streams: Streams, length: int, dim: int, args: Sequence[Any],
                   kwargs: dict[str, Any]) -> list[tuple[list[Any], dict[str, Any]]]:  # fmt: skip
    """(args, kwargs) for each shard: tensors with `length` in `dim` are split, all else is handed on."""
    count = len(streams.layout.sizes)

    def parts(value: Any) -> Sequence[Any]:
        if isinstance(value, Tensor) and value.ndim > dim and value.shape[dim] == length:
            return split(streams, value, dim)
        return [value] * count

    positional = [parts(value) for value in args]
    named = {key: parts(value) for key, value in kwargs.items()}
    return [([p[i] for p in positional], {key: p[i] for key, p in named.items()}) for i in range(count)]


def if_training(position: int, default: bool = False) -> Call:
    """`by_parts` for a function that draws only when its argument `training`, at `position`, says so."""

    def call(streams: Streams, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        training = args[position] if len(args) > position else kwargs.get("training", kwargs.get("train", default))
        if not training:
            return func(*args, **kwargs)
        inplace = kwargs.get("inplace") or (len(args) > position + 1 and args[position + 1] is True)
        found = by_parts(streams, func, args, kwargs)
        return args[0].copy_(found) if inplace else found

    return call


def attend(streams: Streams, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """scaled_dot_product_attention draws in its own kernel when it drops out."""
    dropout_p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return by_parts(streams, func, args, kwargs) if dropout_p else func(*args, **kwargs)


def make(size_at: int) -> Call:
    """torch.rand(3, 4), torch.randint(0, 9, (3, 4)): the size begins at argument `size_at`, or is the last one."""

    def call(streams: Streams, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = "size" in kwargs
        rest = {key: value for key, value in kwargs.items() if key != "size"}
        if named:
            before, size = args, kwargs["size"]
        elif args and not isinstance(args[-1], int | float | Tensor):
            before, size = args[:-1], args[-1]
        else:
            before, size = args[:size_at], args[size_at:]
        if any(isinstance(value, Tensor) for value in args):
            return by_parts(streams, func, args, kwargs)  # torch.normal(means, deviations)
        if not from_default(kwargs) or 0 in size:
            return func(*args, **kwargs)
        if kwargs.get("out") is not None:
            raise NotApart(f"{func.__name__} draws into a tensor of its own (out=)")
        dim = sample_dimension(streams, size, func)
        alone = shapes(streams, size, dim)
        device = device_of(kwargs.get("device"))
        if named:
            return joined(streams, streams.each(device, lambda i: func(*before, size=alone[i], **rest)), dim)
        return joined(streams, streams.each(device, lambda i: func(*before, alone[i], **rest)), dim)

    return call


def permute(streams: Streams, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.randperm(samples): each shard is permuted within its own places."""
    count = args[0] if args else kwargs["n"]
    rest = {key: value for key, value in kwargs.items() if key != "n"}
    if not from_default(kwargs):
        return func(*args, **kwargs)
    dim = sample_dimension(streams, (count,), func)
    sizes = [shape[0] for shape in shapes(streams, (count,), dim)]
    drawn = streams.each(device_of(kwargs.get("device")), lambda i: func(sizes[i], **rest))
    places = streams.layout.split(torch.arange(count, device=drawn[0].device, dtype=drawn[0].dtype))
    return joined(streams, [place[order] for place, order in zip(places, drawn, strict=True)], 0)


def opened(function: Any) -> Any:
    """A function that is written in Python, without its question whether it is overridden: its body, for which it is not.

    Inside a handler nothing is intercepted. To see what such a function calls, its body has to run outside of one.
    """
    asks = {name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_function")}
    found = types.FunctionType(function.__code__, {**function.__globals__, **asks}, function.__name__,
                               function.__defaults__, function.__closure__)  # fmt: skip
    found.__kwdefaults__ = function.__kwdefaults__
    return found


_ELEMENTWISE = {F.dropout, torch.dropout, torch.dropout_}
_T = torch.Tensor

HANDLERS: dict[Any, Call] = {
    **dict.fromkeys(
        (
            F.dropout,
            F.dropout1d,
            F.dropout2d,
            F.dropout3d,
            torch.dropout,
            torch.dropout_,
            torch.feature_dropout,
            torch.feature_dropout_,
        ),
        drop,
    ),
    **dict.fromkeys(
        (_T.bernoulli_, _T.cauchy_, _T.exponential_, _T.geometric_, _T.log_normal_, _T.normal_, _T.random_, _T.uniform_), fill
    ),
    **dict.fromkeys(
        (
            torch.bernoulli,
            _T.bernoulli,
            torch.binomial,
            torch.multinomial,
            _T.multinomial,
            torch.poisson,
            torch.rand_like,
            torch.randint_like,
            torch.randn_like,
        ),
        by_parts,
    ),
    **{f: if_training(2) for f in (F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout)},
    **{f: if_training(3) for f in (F.rrelu, torch.rrelu)},
    F.scaled_dot_product_attention: attend,
    **{f: make(0) for f in (torch.rand, torch.randn)},
    torch.randint: make(2),
    torch.normal: make(2),
    torch.randperm: permute,
}
# written in Python around functions that draw, or around a backward that runs a forward again: gone into
OPENED = {f: opened(f) for f in (F.multi_head_attention_forward, F.gumbel_softmax, torch.Tensor.backward,
                                 torch.autograd.backward, torch.autograd.grad)}  # fmt: skip
