"""What the forward runs on, beside the model that optimizer, EMA and checkpoints see."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class WorkingCopy:
    """`module` is what the forward runs on.

    `pairs` lists (parameter of `module`, parameter of the model) where the two differ: the gradients of the first are
    handed to the second after each window, its weights come back after each update.
    """

    module: nn.Module
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a window's first backward: no gradient is left anywhere.

        By hand, because torch's own enters a profiler range first, a tenth of a small model's step.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def pull_gradients(self) -> None:
        """Hand the window's gradients over to the model's parameters."""

    def push_weights(self) -> None:
        """Bring the working weights up to date after an update or a resume."""


class SameModel(WorkingCopy):
    """No copy: the forward runs on the model itself."""

    def __init__(self, model: nn.Module):
        self.module = model


class HalfCopy(WorkingCopy):
    """A half copy of an fp32 model (apex O2).

    The layers with running statistics are not copied: the very same module serves in both, so their weights stay in
    fp32 (in half their statistics would be lost) and there is one set of statistics to average, save and load.

    Gradients are accumulated in fp32 although they are computed in half: a window of many shards would otherwise lose
    its last ones to rounding, and the fp32 gradient is handed to the master without a copy. DDP cannot do that (its
    buckets have the weights' dtype), so there they arrive in half.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self.module = copy.deepcopy(model, {id(layer): layer for layer in _norms(model)})
        cast(self.module, dtype, keep=_norms(self.module))
        compute_in(self.module, dtype)
        both = zip(self.module.parameters(), model.parameters(), strict=True)
        self.pairs = [(half, master) for half, master in both if half is not master]
        for half, _ in self.pairs:
            half.grad_dtype = torch.float32

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        super().zero_grad(optimizer)
        for half, _ in self.pairs:
            half.grad = None

    @torch.no_grad()
    def pull_gradients(self) -> None:
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for half, master in self.pairs:
            gradient, half.grad = half.grad, None
            if gradient is None or gradient.dtype == master.dtype:
                master.grad = gradient
            else:
                master.grad = torch.empty_like(master)
                sources.append(gradient)
                targets.append(master.grad)
        if targets:
            torch._foreach_copy_(targets, sources)

    @torch.no_grad()
    def push_weights(self) -> None:
        if self.pairs:
            torch._foreach_copy_([half for half, _ in self.pairs], [master for _, master in self.pairs])


class HalfModel(SameModel):
    """The model itself becomes half (apex O3): nothing is kept in fp32 but, on request, the layers with statistics."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool):
        super().__init__(model)
        cast(model, dtype, keep=_norms(model) if keep_batchnorm_fp32 else [])
        compute_in(model, dtype)


def _norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]


@torch.no_grad()
def cast(model: nn.Module, dtype: torch.dtype, keep: list[nn.Module]) -> None:
    """Floating parameters and buffers of `model` become `dtype` in place, except those of the modules `keep`."""
    kept = {id(t) for module in keep for t in (*module.parameters(), *module.buffers())}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.is_floating_point() and id(p) not in kept:
                p.data = p.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and id(buffer) not in kept:
                module._buffers[name] = buffer.to(dtype)


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Let `model` cast its inputs to `dtype` and return fp32, whoever calls it (a wrapper, the evaluation)."""

    def inputs_to(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # an average of the weights that is kept in fp32 carries these hooks too, and wants its inputs in fp32
        wanted = dtype if any(p.dtype == dtype for p in _weights(module)) else torch.float32
        return convert(args, wanted), convert(named, wanted)

    def outputs_to_fp32(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return to_fp32(output)

    model.register_forward_pre_hook(inputs_to, with_kwargs=True)
    model.register_forward_hook(outputs_to_fp32)


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """Of a replica too that nn.parallel.replicate has made: its parameters are tensors beside its modules."""
    yield from module.parameters()
    for part in module.modules():
        yield from getattr(part, "_former_parameters", {}).values()


def to_fp32(output: Any) -> Any:
    """Half tensors in `output` as fp32, so that a loss is never computed in half; everything else as it is."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    return _mapped(output, to_fp32)


def convert(values: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in `values` (tensors, lists, tuples, dicts) as `dtype`."""
    if isinstance(values, Tensor):
        return values.to(dtype) if values.is_floating_point() else values
    return _mapped(values, lambda value: convert(value, dtype))


def _mapped(values: Any, function: Any) -> Any:
    if isinstance(values, dict):
        return type(values)((key, function(value)) for key, value in values.items())
    if isinstance(values, list | tuple):
        parts = [function(value) for value in values]
        return type(values)(*parts) if hasattr(values, "_fields") else type(values)(parts)
    return values
