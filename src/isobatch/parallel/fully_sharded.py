"""A process per replica, each with a part of weights, gradients and optimizer state: torch's fully_shard (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.checks import choice
from isobatch.errors import ConfigError
from isobatch.parallel.processes import Processes

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from isobatch.batch_plan import Batch, Window
    from isobatch.data.feed import MicroBatch
    from isobatch.parallel.base import OtherChoices
    from isobatch.parallel.wire import WeightsInParts
    from isobatch.precision.masters import WorkingCopy
    from isobatch.runtime.distributed import Ranks


@dataclass(frozen=True)
class FullySharded(Processes):
    """Weights are gathered block by block where they are used; gradients come back to where their weights live.

    Args:
        blocks: what is gathered at a time. `auto`: the items of nn.Sequential and nn.ModuleList (the blocks of a timm
            model; see blocks.items), the rest of the model in one piece; else module names, `*` for one part of a name
            ([layer1.*, layer2.*]); [] = the model in one piece, which is also the way out for blocks that only some
            samples run.
        reshard_after_forward: let go of a block's whole weights between its forward and its backward (less memory,
            gathered twice).
        reshard_between_micro_steps: let go of the whole weights after each micro step, not only after a window's last.
        reduce_between_micro_steps: reduce gradients after each micro step and accumulate parts; false: accumulate them
            whole and reduce once a window (less traffic).
        shard_size: ranks that share one copy of the weights; the others hold further copies (hybrid sharding). null = all
            ranks, `node` = those of a machine, or a number that divides the ranks.
        find_unused_parameters: auto | true | false. Where other shards use other parameters, auto and true leave alone what a
            whole window does not use, and auto says when it happens first; false: it gets a gradient of zeros.
    """

    name: str = "fsdp"
    not_recordable: ClassVar[str | None] = "parallel=fsdp gathers weights and sends gradients within a micro step"
    blocks: Any = "auto"
    reshard_after_forward: bool = True
    reshard_between_micro_steps: bool = True
    reduce_between_micro_steps: bool = True
    shard_size: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        named = isinstance(self.blocks, list) and all(isinstance(name, str) for name in self.blocks)
        if not named:
            choice("parallel.blocks", self.blocks, ("auto",))
        if self.reshard_after_forward and not self.reshard_between_micro_steps:
            raise ConfigError("parallel.reshard_between_micro_steps", False,
                              "weights that are let go of after each forward cannot stay whole over a window",
                              "set parallel.reshard_after_forward=false too")  # fmt: skip
        size = self.shard_size
        if size not in (None, "node") and (type(size) is not int or size < 1):
            raise ConfigError("parallel.shard_size", size, "is no number of ranks", "set parallel.shard_size=2, node or null")
        if type(size) is int and self.num_processes > 1:
            self._divides(size, self.num_processes)

    def check_with(self, config: OtherChoices) -> None:
        if config.reduction.exact:
            raise ConfigError("reduction.name", config.reduction.name,
                              f"parallel={self.name} adds gradients inside torch, in an order that depends on the ranks",
                              "set parallel=ddp (the same weights at any number of ranks) or reduction=fast")  # fmt: skip
        if getattr(config.ema, "device", None) is not None:
            raise ConfigError("ema.device", config.ema.device, f"parallel={self.name} cuts the average like the weights",
                              "set ema.device=null: each rank holds its part only")  # fmt: skip
        if config.model.batch_norm == "sync":
            raise ConfigError("model.batch_norm", "sync", "ranks without a shard would take part in its statistics",
                              "set model.batch_norm=shard or frozen, or parallel=ddp")  # fmt: skip

    def check(self, ranks: Ranks) -> None:
        super().check(ranks)
        self._divides(self._size(ranks), ranks.world_size)

    def _size(self, ranks: Ranks) -> int:
        return ranks.local_world_size if self.shard_size == "node" else self.shard_size or ranks.world_size

    def _divides(self, size: int, world_size: int) -> None:
        if world_size % size:
            raise ConfigError("parallel.shard_size", self.shard_size, f"does not divide {world_size} ranks",
                              "set it to null, or to a divisor")  # fmt: skip

    def parts_count(self, replicas: int) -> int:
        return self.shard_size if type(self.shard_size) is int else replicas

    def gathered_bytes(self, model: nn.Module, replicas: int) -> int:
        if replicas == 1:
            return 0
        from isobatch.parallel.blocks import largest_pieces

        weights, gradients = largest_pieces(model, self.blocks, self.reshard_after_forward)
        return weights + (gradients if self.reduce_between_micro_steps else sum(
            p.nbytes for p in model.parameters() if p.requires_grad))  # fmt: skip

    def wire(self, model: nn.Module, precision: Any, gradients: int) -> WeightsInParts:
        import torch

        from isobatch.parallel.blocks import gathered_pieces
        from isobatch.parallel.wire import WeightsInParts

        # of the parts, in fp32 for half weights too: one replica, which `gradients` may be counted for, has a half copy
        sent = None if self.reduce_dtype is None else getattr(torch, self.reduce_dtype)
        gradients = sum(p.numel() * (sent or p.dtype).itemsize for p in model.parameters() if p.requires_grad)
        (rest, rests), (blocks, count) = gathered_pieces(model, self.blocks, precision.gather_dtype())
        twice = (blocks, count) if self.reshard_after_forward else (0, 0)  # but not the rest, see sharding._cut
        return WeightsInParts(gradients, rest + blocks, rests + count, *twice,
                     self.shard_size if type(self.shard_size) is int else None,
                     self.reshard_between_micro_steps, self.reduce_between_micro_steps)  # fmt: skip

    def working_copy(self, precision: Any, model: nn.Module, replicas: int) -> WorkingCopy:
        # the parts are the fp32 masters: half weights are gathered from them, and no half copy is kept
        return precision.working_copy(model, gathered=replicas > 1)  # type: ignore[no-any-return]

    def partition(self, model: nn.Module, ema: nn.Module | None, precision: Any, ranks: Ranks, device: torch.device,
              example: Callable[[], Tensor]) -> None:  # fmt: skip
        if ranks.world_size > 1:
            from isobatch.parallel.sharding import fully_sharded

            dtype = precision.gather_dtype()
            fully_sharded(model, ema, self, self._size(ranks), dtype, ranks, device, example())

    def wrap(self, model: nn.Module, ranks: Ranks, device: torch.device) -> nn.Module:
        return model

    def begin(self, wrapped: nn.Module, batch: Batch, window: Window, ranks: Ranks) -> None:
        if units := _of(wrapped):
            steps = [batch.steps_with(replica, window.num_filled) for replica in (0, ranks.rank)]
            units.behind = steps[0] - steps[1]  # replica 0 has the most

    def gradient_sync(self, wrapped: nn.Module, micro: MicroBatch) -> AbstractContextManager[Any]:
        if units := _of(wrapped):
            units.enter(last=micro.is_last and not units.behind)
        return nullcontext()

    def aside(self, wrapped: nn.Module, micro: MicroBatch | None) -> AbstractContextManager[Any]:
        units = _of(wrapped)
        return units.aside(idle=micro is None) if units else nullcontext()  # type: ignore[no-any-return]

    def end(self, wrapped: nn.Module) -> None:
        if units := _of(wrapped):
            units.end()

    def evaluated(self, model: nn.Module, behind: int) -> None:
        if units := _of(model):
            units.evaluated(behind)

    def describe(self, ranks: Ranks, device: torch.device) -> str:
        if ranks.world_size == 1:
            return f"FSDP over 1 rank, {device.type}: the weights stay whole"
        size = self._size(ranks)
        copies = f" x {ranks.world_size // size} copies" if size < ranks.world_size else ""
        return f"FSDP over {ranks.world_size} ranks, {device.type}: weights in {size} part(s){copies}"


def _of(model: nn.Module) -> Any:
    """What sharding.fully_sharded left on `model`; None where there is one rank."""
    return getattr(model, "fsdp_units", None)
