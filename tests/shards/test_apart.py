"""Several shards in one forward: whatever a forward draws or normalises, each shard gets what it would get alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from isobatch.shards import norms
from isobatch.shards.apart import Apart
from isobatch.shards.layout import Lanes, Layout
from isobatch.shards.streams import NotApart, Streams

CPU = torch.device("cpu")
LAYOUTS = [Layout((3, 3, 3)), Layout((4, 4, 3)), Layout((3, 2)), Layout((1, 1)), Layout((4, 3, 3), False),
           Layout((2, 2), False)]  # fmt: skip
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def batch(layout: Layout, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(layout.samples, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def together(layout: Layout, forward: Callable[[Tensor], Any], x: Tensor, seeds: list[int] | None = None) -> Any:
    apart = Apart([Streams(layout, CPU, seeds or list(range(len(layout.sizes))), 7)])
    apart.begin()
    with apart:
        found = forward(x)
    apart.check()
    return found


def alone(layout: Layout, forward: Callable[[Tensor], Any], x: Tensor) -> list[Any]:
    found = []
    for shard, part in enumerate(layout.split(x)):
        torch.default_generator.manual_seed(shard)
        found.append(forward(part.clone(memory_format=torch.preserve_format)))
    return found


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4), st.sampled_from([1, 2, 3]), st.booleans())
def test_what_is_split_joins_again(base: int, shards: int, longer: int, rows: int, interleaved: bool) -> None:
    layout = Layout(tuple(base + (g < longer) for g in range(shards)), interleaved)
    x = torch.arange(layout.samples * rows * 2).view(-1, 2)
    parts = layout.split(x)
    assert [len(part) for part in parts] == [rows * size for size in layout.sizes]
    assert torch.equal(layout.join(parts), x)
    if interleaved:  # sample n is of shard n mod k, as window[v::V] is
        for shard, part in enumerate(parts):
            mine = x.view(layout.samples, rows, 2)[shard :: len(layout.sizes)]
            assert torch.equal(part, mine.reshape(-1, 2))
    wide = layout.times(3)
    parts = [torch.arange(3 * size) + 100 * g for g, size in enumerate(layout.sizes)]
    assert all(torch.equal(a, b) for a, b in zip(wide.split(wide.join(parts)), parts, strict=True))
    lanes = Lanes((layout, Layout((2, 1), interleaved)))
    x = torch.arange(lanes.samples * rows * 2).view(-1, 2)
    assert torch.equal(lanes.join(lanes.split(x)), x)
    assert [len(chunk) for chunk in lanes.chunks(x)] == [rows * layout.samples, rows * 3]


def noisy(x: Tensor) -> Tensor:
    """Something that lets a wrong row show."""
    return x * 3 + 1


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(noisy(x), 0.3, True, True),
    "dropout half": lambda x: F.dropout(x.bfloat16(), 0.3),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, True),
    "torch.dropout_": lambda x: torch.dropout_(noisy(x), 0.3, train=True),
    "module": lambda x: nn.Dropout(0.4)(noisy(x)),
    "dropout1d": lambda x: nn.Dropout1d(0.4)(x[:, :, 0]),
    "dropout2d": lambda x: nn.Dropout2d(0.4)(x),
    "dropout3d": lambda x: nn.Dropout3d(0.4)(x.unsqueeze(-1)),
    "alpha": lambda x: nn.AlphaDropout(0.4)(x),
    "feature alpha": lambda x: nn.FeatureAlphaDropout(0.4)(x),
    "rrelu": lambda x: nn.RReLU()(x),
    "rrelu in place": lambda x: nn.RReLU(inplace=True)(noisy(x)),
    "sequences first": lambda x: F.dropout(x.flatten(1)[:, :23, None].permute(1, 0, 2), 0.5),
    "windows": lambda x: F.dropout(x.flatten(2).flatten(0, 1), 0.5),
    "channels last": lambda x: F.dropout(x.contiguous(memory_format=torch.channels_last), 0.5),
    "bernoulli_": lambda x: x.new_empty(len(x), 1, 1).bernoulli_(0.7),
    "bernoulli_ of a tensor": lambda x: x.new_empty(x.shape).bernoulli_(x.sigmoid()),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "Tensor.bernoulli": lambda x: x.sigmoid().bernoulli(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "normal_": lambda x: x.new_empty(x.shape).normal_(),
    "normal_ of many": lambda x: x.new_empty(len(x), 40).normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "random_": lambda x: torch.empty_like(x).random_(100),
    "rand": lambda x: torch.rand(len(x), 3),
    "rand of a size": lambda x: torch.rand((len(x), 3)),
    "randn": lambda x: torch.randn(x.shape),
    "randn size=": lambda x: torch.randn(size=(len(x), 2), dtype=torch.float64),
    "randint": lambda x: torch.randint(9, (len(x),)),
    "randint low": lambda x: torch.randint(2, 9, (len(x), 2)),
    "randint size=": lambda x: torch.randint(low=2, high=9, size=(len(x), 2)),
    "normal": lambda x: torch.normal(0.0, 1.0, (len(x), 3)),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "normal of a tensor": lambda x: torch.normal(x, 2.0),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "multinomial": lambda x: torch.multinomial(x.abs().flatten(1), 2),
    "poisson": lambda x: torch.poisson(x.abs()),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 10), x.sigmoid()),
    "gumbel": lambda x: F.gumbel_softmax(x.flatten(1), hard=True),
    "permuted": lambda x: x[torch.randperm(len(x))],
    "patches": lambda x: torch.argsort(torch.randn(len(x), 5), dim=-1),
    "twice": lambda x: F.dropout(F.dropout(x, 0.5) + torch.rand_like(x), 0.2),
    "functional attention": lambda x: F.scaled_dot_product_attention(*[noisy(x.flatten(2))] * 3, dropout_p=0.4),
}  # fmt: skip


@layouts
@pytest.mark.parametrize("name", DRAWS)
def test_a_function_draws_for_each_shard_what_it_would_draw_alone(name: str, layout: Layout) -> None:
    x = batch(layout, 4, 3, 2)
    expected, found = alone(layout, DRAWS[name], x), together(layout, DRAWS[name], x)
    if name == "sequences first":
        found = found.transpose(0, 1)
        expected = [part.transpose(0, 1) for part in expected]
    for part, other in zip(layout.split(found), expected, strict=True):
        assert part.dtype == other.dtype and torch.equal(part, other)
    again = together(layout, DRAWS[name], x, [g + 50 for g in range(len(layout.sizes))])
    assert name in ("permuted", "randint") or layout.samples < 3 or not torch.equal(again, together(layout, DRAWS[name], x))


@pytest.mark.parametrize("layout", [Layout((3, 3, 3)), Layout((4, 4, 3)), Layout((4, 3, 3), False)], ids=str)
@pytest.mark.parametrize("name", ["attention", "needs no weights", "sequences first", "encoder", "pre-norm encoder", "timm"])
def test_a_module_draws_for_each_shard_what_it_would_draw_alone(name: str, layout: Layout) -> None:
    torch.manual_seed(1)
    attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=name != "sequences first").double()
    first = name == "pre-norm encoder"
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True, norm_first=first).double()
    from timm.layers import DropPath, PatchDropout

    timm = nn.Sequential(PatchDropout(0.4), DropPath(0.3), nn.Dropout(0.2))
    forward: Callable[[Tensor], Tensor] = {
        "attention": lambda x: attention(x, x, x)[0], "encoder": encoder, "pre-norm encoder": encoder, "timm": timm,
        "needs no weights": lambda x: attention(x, x, x, need_weights=False)[0],
        "sequences first": lambda x: attention(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1),
    }[name]  # fmt: skip
    x = batch(layout, 5, 8)
    expected, found = alone(layout, forward, x), together(layout, forward, x)
    for part, other in zip(layout.split(found), expected, strict=True):
        torch.testing.assert_close(part, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("draw", [
    lambda x: torch.rand(1), lambda x: torch.rand(7), lambda x: torch.rand(3, 5), lambda x: F.dropout(torch.ones(5), 0.5),
    lambda x: torch.empty(7).normal_(), lambda x: torch.randperm(7), lambda x: torch.rand(9, 2, out=torch.empty(9, 2)),
])  # fmt: skip
def test_a_draw_for_all_shards_at_once_is_found(draw: Callable[[Tensor], Any]) -> None:
    layout = Layout((3, 3, 3))
    with pytest.raises(NotApart, match="draws"):
        together(layout, draw, batch(layout, 2))


def test_draws_that_are_not_seen_are_found() -> None:
    layout = Layout((3, 3, 3))
    recurrent = nn.LSTM(4, 4, 2, dropout=0.5)  # its dropout is inside a function that is not known to draw
    x = torch.ones(2, 9, 4)
    for forward in (lambda x: recurrent(x), lambda x: (recurrent(x), torch.rand(9)), lambda x: (torch.rand(9), recurrent(x))):
        with pytest.raises(NotApart, match="a C\\+\\+ extension, say"):
            together(layout, forward, x)
    recurrent.eval()
    together(layout, lambda x: recurrent(x), x)
    own = torch.Generator().manual_seed(3)  # keeps its own books
    assert torch.equal(together(layout, lambda x: torch.rand(2, generator=own), x),
                       torch.rand(2, generator=torch.Generator().manual_seed(3)))  # fmt: skip


def test_what_does_not_train_draws_nothing() -> None:
    layout = Layout((3, 3, 3))
    x = batch(layout, 4, 3, 3)
    for forward in (nn.Dropout(0.5).eval(), nn.Dropout2d(0.0), nn.RReLU().eval(), nn.AlphaDropout(0.5).eval(),
                    lambda x: F.scaled_dot_product_attention(x, x, x)):  # fmt: skip
        apart = Apart([Streams(layout, CPU, [0, 1, 2], 7)])
        apart.begin()
        with apart:
            assert torch.equal(forward(x), forward(x))
        assert apart.only.draws == 0


@layouts
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_part_that_runs_again_for_the_backward_draws_the_same(reentrant: bool, layout: Layout) -> None:
    if min(layout.sizes) == 1:
        return
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)).double() for _ in range(3)]

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
            x = x + torch.rand_like(x)  # outside of what runs again
        return x

    def gradients(run: Callable[[], Tensor]) -> list[Tensor]:
        for block in blocks:
            block.zero_grad()
        run()
        return [p.grad.clone() for block in blocks for p in block.parameters()]

    x = batch(layout, 6).requires_grad_()

    def each() -> None:
        for shard, part in enumerate(layout.split(x.detach())):
            torch.default_generator.manual_seed(shard)
            forward(part.clone().requires_grad_()).square().sum().backward()

    expected = gradients(each)
    found = gradients(lambda: together(layout, lambda x: forward(x).square().sum().backward(), x))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "1d with length": (lambda: nn.BatchNorm1d(4), (4, 5)),
    "2d": (lambda: nn.BatchNorm2d(4), (4, 3, 2)),
    "3d": (lambda: nn.BatchNorm3d(4), (4, 3, 2, 2)),
    "no affine": (lambda: nn.BatchNorm2d(4, affine=False), (4, 3, 2)),
    "no statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (4, 3, 2)),
    "momentum": (lambda: nn.BatchNorm2d(4, momentum=0.7, eps=0.1), (4, 3, 2)),
    "average": (lambda: nn.BatchNorm2d(4, momentum=None), (4, 3, 2)),
    "tokens": (lambda: Tokens(), (5, 4)),
    "with activation": (lambda: _timm().BatchNormAct2d(4, drop_layer=None), (4, 3, 2)),
    "instance": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (4, 3, 2)),
    "instance without": (lambda: nn.InstanceNorm2d(4), (4, 3, 2)),
    "frozen": (lambda: nn.BatchNorm2d(4).eval(), (4, 3, 2)),
    "groups": (lambda: nn.GroupNorm(2, 4), (4, 3, 2)),
}


def _timm() -> Any:
    import timm.layers

    return timm.layers


class Tokens(nn.BatchNorm1d):
    """(N, T, C): every token is a row."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view(x.shape)


@layouts
@pytest.mark.parametrize("form", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", NORMS)
def test_each_shard_is_normalised_as_if_alone(name: str, form: str, layout: Layout) -> None:
    make, shape = NORMS[name]
    if (form == "channels_last" and len(shape) != 3) or (min(layout.sizes) == 1 and len(shape) == 1):
        return
    norm = make().double()
    for p in norm.parameters():
        nn.init.normal_(p)
    x = (batch(layout, *shape) * torch.arange(1, layout.samples + 1).view(-1, *[1] * len(shape))).requires_grad_()
    if form == "channels_last":
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    base = {k: b.clone() for k, b in norm.named_buffers()}

    def put_back() -> None:
        for key, buffer in norm.named_buffers():
            buffer.copy_(base[key])

    weights = batch(layout, *shape, seed=1)
    out = together(layout, norm, x)
    gradients = torch.autograd.grad((out * weights).sum(), [x, *norm.parameters()])
    statistics = {k: b.clone() for k, b in norm.named_buffers() if k.startswith("running")}
    means: dict[str, Tensor] = {k: torch.zeros_like(b) for k, b in statistics.items()}
    parts = [part.clone(memory_format=torch.preserve_format) for part in layout.split(x.detach())]
    totals = [torch.zeros_like(p) for p in norm.parameters()]
    inputs, outputs = [], []
    for part, weight in zip(parts, layout.split(weights), strict=True):
        put_back()
        alone = norm(part.requires_grad_())
        into, *others = torch.autograd.grad((alone * weight).sum(), [part, *norm.parameters()])
        inputs.append(into)
        outputs.append(alone)
        totals = [a + b for a, b in zip(totals, others, strict=True)]
        means = {k: means[k] + b / len(parts) for k, b in norm.named_buffers() if k in means}
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(out, layout.join(outputs), **close)
    torch.testing.assert_close(gradients[0], layout.join(inputs), **close)
    for found, expected in zip([*gradients[1:], *statistics.values()], [*totals, *means.values()], strict=True):
        torch.testing.assert_close(found, expected, **close)


def test_batch_norm_over_other_rows_than_samples_is_found() -> None:
    layout = Layout((3, 3, 3))
    with pytest.raises(NotApart, match="batch norm gets 7 rows"):
        together(layout, nn.BatchNorm1d(2).double(), batch(layout, 2)[:7])


def test_even_shards_cost_one_call_and_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_by_shard", lambda *_: pytest.fail("a call for each shard"))
    layout = Layout((4, 4, 4))
    x = batch(layout, 2, 3, 3)
    found = together(layout, nn.BatchNorm2d(2).double(), x)
    alone = [nn.BatchNorm2d(2).double()(part) for part in layout.split(x)]
    torch.testing.assert_close(found, layout.join(alone), rtol=1e-12, atol=1e-12)
