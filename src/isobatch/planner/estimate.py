"""Memory of one replica: what is there all the time, counted on a copy without data, and what a micro batch adds."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isobatch.batch_plan import Batch
from isobatch.config import Config
from isobatch.parallel.wire import WeightsInParts, WholeGradients

MB = 2**20
SAME_MODEL = "full", "autocast"  # levels of precision whose working copy is the model as it is


class SavedTensor(NamedTuple):
    """One thing the forward leaves for the backward: bytes of a new storage, or of the gradient of a weight it used.

    scratch: a convolution's gradient is made in the kernel's own layout first and then copied.
    """

    nbytes: int
    gradient: int
    scratch: int = 0


AROUND_STEPS = 16  # an optimizer around another one does its own every few steps


@dataclass(frozen=True)
class Resident:
    """Bytes that one replica holds in every step; `optimizer` is None where it could not be told without a step.

    Where a strategy cuts weights, gradients, optimizer state and average into parts, those of one part.

    Args:
        gathered: whole weights and gradients that are there for a moment beside the parts.
        weights: of the model, with buffers. working: half copy that computes (O2). sums: partial sums of reduction=exact.
        wire: what replicas exchange.
    """

    weights: int
    working: int
    gradients: int
    optimizer: int | None
    ema: int
    sums: int
    wire: WholeGradients | WeightsInParts
    gathered: int = 0

    @property
    def beside(self) -> int:
        """All but weights and gradients, which a trial has by itself."""
        return (self.optimizer or 0) + self.ema + self.sums

    @property
    def total(self) -> int:
        return self.weights + self.working + self.gathered + self.gradients + self.beside


def resident(config: Config, model: nn.Module, batch: Batch, lanes: int = 1) -> Resident:
    """Counted without touching `model`: half precision and the optimizer run on tensors without data."""
    weights = model if config.precision.name in SAME_MODEL else on_meta(model)  # a copy costs a tenth of a second
    working = config.parallel.working_copy(config.precision, weights, batch.num_replicas)  # O3 makes the model itself half
    trained = [p for p in working.module.parameters() if p.requires_grad]
    masters = {id(p) for p in weights.parameters()}
    copied = [p for p in working.module.parameters() if id(p) not in masters]
    several = batch.num_replicas > 1 and config.parallel.num_processes > 1
    gradients = sum(p.numel() * (p.grad_dtype or p.dtype).itemsize for p in trained)
    if several and working.pairs:  # DDP's buckets have the half weights' dtype and stay beside the masters' gradients
        gradients += nbytes(half for half, _ in working.pairs)
    dtype = getattr(config.parallel, "reduce_dtype", None)
    sent = sum(p.numel() * (getattr(torch, dtype) if dtype else p.dtype).itemsize for p in trained)
    average = nbytes(state_of(weights)) if config.ema.name != "none" and not getattr(config.ema, "device", None) else 0
    if average and any(p.dtype.itemsize == 2 for p in weights.parameters()):
        average = sum(4 * t.numel() for t in state_of(weights))  # a half model has an fp32 average
    parts = config.parallel.parts_count(batch.num_replicas)
    state, buffers = optimizer_state(config, weights, batch), nbytes(weights.buffers())

    def part(size: int, whole: int = 0) -> int:
        return whole - (whole - size) // parts  # rounded up

    return Resident(
        part(nbytes(state_of(weights)), buffers), nbytes(copied), part(gradients), state and part(state),
        part(average, min(average, buffers)), sums(config, batch, gradients, lanes),
        config.parallel.wire(weights, config.precision, sent),
        config.parallel.gathered_bytes(weights, batch.num_replicas),
    )  # fmt: skip


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` whose tensors have shapes and dtypes but no data."""
    memo: dict[int, Any] = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
                            for p in model.parameters()}  # fmt: skip
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    return copy.deepcopy(model, memo)


def state_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def optimizer_state(config: Config, model: nn.Module, batch: Batch) -> int | None:
    """Bytes of the state that the optimizer has after a step, from a step without data; None if it needs data.

    One parameter stands for all of its shape: a network has few shapes and many layers.
    """
    kinds = Counter((p.shape, p.dtype) for p in model.parameters() if p.requires_grad)
    stand_ins = nn.Module()
    for i, (shape, dtype) in enumerate(kinds):
        stand_ins.register_parameter(f"kind{i}", nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
    # fused kernels want a real device, layers a real model; the state is the same without
    options: Any = config.optimizer
    without = {key: value for key, value in (("fused", False), ("layer_decay", None)) if hasattr(options, key)}
    words = logging.getLogger("isobatch.optimizer")
    before, words.disabled = words.disabled, True  # what it has to say is said when the training builds it
    try:
        optimizer = dataclasses.replace(options, **without).build(stand_ins, batch.effective)
        for parameter in stand_ins.parameters():
            parameter.grad = torch.empty_like(parameter)
        with warnings.catch_warnings(action="ignore"):
            optimizer.step()
            states = _states(optimizer)
            for _ in range(AROUND_STEPS if len(states) > 1 else 0):
                optimizer.step()
    except (RuntimeError, TypeError, ValueError):
        return None
    finally:
        words.disabled = before
    return sum(
        count * nbytes(t for state in states for t in _tensors(state.get(parameter)) if t.numel() > 1)  # not the step counts
        for parameter, count in zip(stand_ins.parameters(), kinds.values(), strict=True)
    )


def _states(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The state of `optimizer`, and of those that it is laid around."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    found = {id(state): state for one in inner for state in _states(one)}
    return list({id(optimizer.state): optimizer.state, **found}.values())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def sums(config: Config, batch: Batch, gradients: int, lanes: int = 1) -> int:
    """reduction=exact: partial sums along the tree of a replica's shards, or one float64 per weight; with several lanes the
    gradients of each, and of one shard that waits for its turn, beside those that are counted anyway."""
    options: Any = config.reduction
    if not options.exact:
        return 0
    waiting = lanes * gradients if lanes > 1 else 0
    if options.resolved_method(batch.num_shards) == "bin64":
        return waiting + 2 * gradients
    return waiting + gradients * (batch.busiest.bit_length() - 1 + (batch.num_replicas > 1))


def saved_tensors(module: nn.Module, given: Sequence[Tensor], loss: Callable[[], Tensor]) -> list[SavedTensor]:
    """What `loss()` saves for its backward, each storage once; weights, buffers and `given` are there anyway."""
    parameters = {p.untyped_storage().data_ptr(): p for p in module.parameters()}
    seen = {t.untyped_storage().data_ptr() for t in (*module.buffers(), *given)}
    found: list[SavedTensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in seen:
            seen.add(key)  # alive until the backward, so no other storage gets its address
            weight = parameters.get(key)
            if weight is None:
                found.append(SavedTensor(storage.nbytes(), 0))
            elif weight.requires_grad:
                gradient = weight.numel() * (weight.grad_dtype or weight.dtype).itemsize
                found.append(SavedTensor(0, gradient, gradient if weight.ndim > 2 else 0))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = loss()
    del kept
    return found


def peak(saved: Sequence[SavedTensor], gradients: int, all_gradients: bool) -> int:
    """Largest sum of saved tensors, gradients and what flows between layers, at any moment of a window.

    The gradients of the window before are there until a forward has ended. The backward then goes through `saved` from
    its end, frees what it has used and leaves gradients; beside that the gradient of a layer's output and of its input
    are there, as large as the two largest of its neighbourhood.

    Args:
        gradients: bytes of all gradients. all_gradients: they are there in the backward too (accumulation, DDP).
    """
    left, made = sum(s.nbytes for s in saved), 0
    highest = left + gradients
    for i in reversed(range(len(saved))):
        flowing = sum(sorted(s.nbytes for s in saved[max(0, i - 1) : i + 2])[-2:])
        made += saved[i].gradient
        highest = max(highest, left + flowing + saved[i].scratch + (gradients + saved[i].gradient if all_gradients else made))
        left -= saved[i].nbytes
    return highest


def available_bytes() -> int:
    """Main memory that this process's machine or container still has."""
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS knows only the latter
    found = [os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")]
    meminfo = _read("/proc/meminfo")
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            found = [int(line.split()[1]) * 1024]  # counts caches that would be given back
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.strip().isdigit() and used.strip().isdigit():
        cached = [int(line.split()[1]) for line in _read("/sys/fs/cgroup/memory.stat").splitlines()
                  if line.startswith("inactive_file ")]  # fmt: skip
        found.append(int(limit) - int(used) + sum(cached))
    return max(0, min(found))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
