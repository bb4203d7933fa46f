"""torch's fully_shard with what a window needs added: ranks with fewer micro steps than others, and gradients as sums.

Every forward and backward of a sharded model is a chain of collectives, which all ranks have to go through alike. A rank
that has no (further) shard therefore walks through the model with an example and a gradient of zeros: the same collectives
in the same order, whatever the model does, while running statistics and generators stay as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from isobatch.errors import ConfigError, reason
from isobatch.parallel.blocks import choose_blocks
from isobatch.parallel.completion import Usage
from isobatch.parallel.unused import tensors_in, trainable, unnoticed, without_gradient
from isobatch.runtime.trees import Tree, call
from isobatch.train.batch_norm import tracking_layers

if TYPE_CHECKING:
    from isobatch.parallel import FullySharded as Options
    from isobatch.runtime.distributed import Ranks

log = logging.getLogger(__name__)


def fully_sharded(model: nn.Module, ema: nn.Module | None, options: Options, size: int, dtype: torch.dtype | None,
                  ranks: Ranks, device: torch.device, example: Tree) -> None:  # fmt: skip
    """Cut `model` and `ema` into `size` parts, in place, and leave a `FsdpUnits` on each as `fsdp_units`. A collective.

    Args:
        size: ranks that share one copy of the weights.
        dtype: the weights are gathered in (layers with running statistics: in their own); None: all in their own.
        example: (2, ...) inputs as a training forward gets them.

    Raises:
        ConfigError: torch cannot shard this model, or not with half weights.
    """
    from torch.distributed.device_mesh import init_device_mesh

    called: dict[str, int] = {}
    hooks = [m.register_forward_hook(_count(called, name)) for name, m in model.named_modules() if name]
    missed = without_gradient(model, example)
    for hook in hooks:
        hook.remove()
    names = choose_blocks(model, options.blocks, called)
    asked = options.find_unused_parameters
    names_of = [name for name, p in model.named_parameters() if p.requires_grad]
    usage = None if asked is False else Usage(names_of, ranks, "parallel.find_unused_parameters" if asked == "auto" else None)
    unused = Unused(usage, same=any(missed))
    if any(missed):
        log.info("parallel.find_unused_parameters=%s: the first sample leaves %d of %d parameters without a gradient",
                 asked, sum(missed), len(missed))  # fmt: skip
    shape = (ranks.world_size,) if size == ranks.world_size else (ranks.world_size // size, size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    _refuse_buffers(model, dtype)
    for module, weights in ((model, dtype), (ema, None)):
        if module is None:
            continue
        try:
            _cut(module, names, options, weights, mesh)
        except (ValueError, NotImplementedError, AssertionError) as error:
            why = reason(error, 160)
            raise ConfigError("parallel.name", options.name, f"torch cannot shard this model ({why})",
                              "set parallel=ddp") from None  # fmt: skip
        module.fsdp_units = FsdpUnits(module, example, options, ranks, unused if module is model else None)  # type: ignore[assignment]
    log.info("parallel=%s: %d block(s) and the rest, %d part(s) each", options.name, len(names), size)


def _count(called: dict[str, int], name: str) -> Any:
    def hook(*_: Any) -> None:
        called[name] = called.get(name, 0) + 1

    return hook


def _refuse_buffers(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Half activations that meet an fp32 buffer become fp32, and no half weight takes those."""
    if dtype is None:
        return
    own = {id(b) for layer in tracking_layers(model) for b in layer.buffers()}
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and id(buffer) not in own:
            raise ConfigError("parallel.name", "fsdp", f"gathers half weights, but the model's buffer {name} stays in fp32",
                              "set precision=bf16 or amp, or parallel=ddp")  # fmt: skip


def _cut(model: nn.Module, names: list[str], options: Options, dtype: torch.dtype | None, mesh: Any) -> None:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    reduce_dtype = None if options.reduce_dtype is None else getattr(torch, options.reduce_dtype)
    if dtype is not None and reduce_dtype is None:
        reduce_dtype = torch.float32  # where the masters collect: a sum over a window must not be rounded to half
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    own = MixedPrecisionPolicy(reduce_dtype=None if options.reduce_dtype is None else reduce_dtype)
    apart = dtype is not None or len({p.dtype for p in model.parameters()}) > 1
    for p in model.parameters():
        p.data = p.data.contiguous()  # channels_last: torch cuts only what lies in order, and its kernels reorder
    for module in [*(model.get_submodule(name) for name in names), model]:
        root = module is model
        # the whole model's own weights are wanted again as soon as the backward begins
        kept: Any = {"mesh": mesh, "reshard_after_forward": options.reshard_after_forward and not root}
        norms: list[Any] = [n for n in tracking_layers(module) if apart and not isinstance(n, FSDPModule)
                            and any(True for _ in n.parameters())]  # fmt: skip
        if norms and norms != [module]:  # a group has one dtype, and these keep theirs
            fully_shard(norms if len(norms) > 1 else norms[0], mp_policy=own, **kept)
        fully_shard(module, mp_policy=own if norms == [module] else policy, **kept)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # plain sums: the losses are weighted already
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


class Unused(NamedTuple):
    """What is done about parameters without a gradient (see `find_unused_parameters`).

    Args:
        usage: of a window by all ranks, so that what is used nowhere is left without a gradient; None: nobody asks.
        same: some are missing in every shard alike, so torch leaves them out of its messages.
    """

    usage: Usage | None
    same: bool


class FsdpUnits:
    """One sharded model in the life of a window. `unused`: None for a model that does not train."""

    def __init__(self, model: nn.Module, example: Tree, options: Options, ranks: Ranks, unused: Unused | None):
        from torch.distributed.fsdp import FSDPModule

        self.model, self.example, self.options, self.ranks = model, example, options, ranks
        self.units = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self.behind = 0  # micro steps that this rank has fewer than the busiest in this window
        self.attending, self.flags = False, (True, True)
        self.usage, same = unused or Unused(None, True)
        self.parameters = trainable(model)
        if self.usage is not None or not same:
            for unit in self.units:  # zeros for what got none, so that all ranks send the same
                unit.set_reduce_scatter_unused_params(True)
        if self.usage is not None:
            self._watch(self.usage)

    def _watch(self, usage: Usage) -> None:
        """Note which parameters get a gradient: those that are gathered, which are the same objects every time."""
        for unit in self.units:
            unit.unshard()
        for i, p in enumerate(trainable(self.model)):
            p.register_post_accumulate_grad_hook(lambda _, i=i: self._saw(usage, i))
        for unit in self.units:
            unit.reshard()

    def _saw(self, usage: Usage, i: int) -> None:
        if not self.attending:
            usage.used[i] = 1

    def enter(self, last: bool) -> None:
        """Before a micro step. `last`: of the busiest rank's in this window."""
        options = self.options
        flags = last or options.reduce_between_micro_steps, last or options.reshard_between_micro_steps
        if flags == self.flags:
            return
        self.flags = flags
        for unit in self.units:
            unit.set_requires_gradient_sync(flags[0], recurse=False)
            unit.set_reshard_after_backward(flags[1], recurse=False)

    def end(self) -> None:
        """After this rank's last micro step: take part in those of the others."""
        for left in reversed(range(self.behind)):
            self.enter(last=not left)
            self._attend()
        for i in self.usage.end() if self.usage is not None else ():
            self.parameters[i].grad = None

    @contextmanager
    def aside(self, idle: bool) -> Iterator[None]:
        """Around one micro step of all ranks that belongs to no window; `idle`: this rank has none, and takes part."""
        self.enter(last=True)
        if idle:
            self._attend()
        self.attending = True  # nothing is noted
        yield
        self.attending = False

    def _attend(self) -> None:
        """Forward and backward that add nothing."""
        self.attending = True
        with unnoticed(self.model, self.example):
            outputs = [t for t in tensors_in(call(self.model, self.example)) if t.requires_grad]
            torch.autograd.backward(outputs, [torch.zeros_like(t) for t in outputs])
        self.attending = False

    def evaluated(self, behind: int) -> None:
        """Take part in `behind` forwards of other ranks, and let go of what is still whole."""
        self.attending = True
        for _ in range(behind):
            with unnoticed(self.model, self.example), torch.no_grad():
                call(self.model, self.example)
        self.attending = False
        for unit in self.units:
            unit.reshard()
