"""Every seed of a run. A seed is a function of what is drawn for, never of rank, worker or number of calls before."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# held by whoever has the default generator of the CPU in a state of his own while other threads may draw
DRAWING = threading.RLock()


def seed_of(purpose: str, *key: int) -> int:
    """A 63-bit seed from a purpose and integers: the same in every process, on every plan."""
    digest = blake2b(repr((purpose, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), NumPy and Python before the weights are drawn."""
    import numpy
    import torch

    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


class ShardSeeder:
    """Seeds every draw of a training: a shard's from (seed, step, shard), those of its update from (seed, step), those of an
    evaluation from (seed, step, batch). So none depends on a rank, nor on what was drawn before.

    The generators are seeded directly: torch.manual_seed formats a stack for its lazy CUDA call and is 100 times slower.
    A device's generator keeps its seed on the host, so nothing here waits for it.
    """

    def __init__(self, seed: int, devices: list[torch.device], host: bool = True, forward: bool = True):
        """Seeding takes a twentieth of a small model's step each: `forward`: whether a forward may draw at all; `host`: whether
        from NumPy or Python, too."""
        import torch

        from isobatch.runtime.accelerator import generator

        self.seed, self.host, self.forward = seed, host, forward
        self.generators = [generator(device) for device in devices]
        self.all = list({id(g): g for g in (*self.generators, torch.default_generator)}.values())
        self.own: tuple[object, list[Any]] = (None, [])

    def __call__(self, step: int, shards: tuple[int, ...]) -> None:
        """Before a forward: what dropout and stochastic depth draw from. Shard i of the micro step runs on device i."""
        if not self.forward:
            return
        first = seed_of("shard", self.seed, step, shards[0])
        self.generators[0].manual_seed(first)
        for generator, shard in zip(self.generators[1:], shards[1:], strict=False):
            generator.manual_seed(seed_of("shard", self.seed, step, shard))
        if self.host:
            seed_host(first)

    def update(self, step: int, optimizer: object) -> None:
        """Before an update: what an optimizer or a hook of its step draws, alike on all ranks.

        Torch's own optimizers draw nothing, and are spared the seeding, which takes a twentieth of a small model's step.
        """
        if self.own[0] is not optimizer:
            draws = type(optimizer).__module__.partition(".")[0] != "torch" or has_step_hooks(optimizer)
            found = [seeder for value in vars(optimizer).values() if (seeder := seeder_of(value))]
            self.own = optimizer, [self._seed, *found] if draws else found
        if self.own[1]:
            key = seed_of("update", self.seed, step)
            for seeder in self.own[1]:
                seeder(key)

    def evaluation(self, step: int, batch: int) -> None:
        """Before a forward of an evaluation after `step` steps."""
        self._seed(seed_of("evaluation", self.seed, step, batch))

    def _seed(self, key: int) -> None:
        for generator in self.all:
            generator.manual_seed(key)
        seed_host(key)


def seed_host(key: int) -> None:
    """Seed NumPy and Python."""
    import numpy

    numpy.random.seed(key % 2**32)
    random.seed(key)


TORCH_ALONE = frozenset({"torch", "timm", "isobatch"})  # their forwards draw from torch's generators: a test reads them


DRAW_NOTHING = ("Sequential", "Flatten", "Identity", "Linear", "ReLU", "LayerNorm", "BatchNorm1d", "BatchNorm2d", "Conv2d",
                "MaxPool2d", "AdaptiveAvgPool2d", "CrossEntropyLoss", "MSELoss")  # fmt: skip # of torch.nn


def code_of(module: Any, criterion: Any, *others: Any) -> list[Any]:
    """What runs in a forward and its backward: the types of modules, functions in their place, hooks."""
    from torch.nn import Module
    from torch.nn.modules import module as torch_s

    code = [*others]
    for hooks in (torch_s._global_forward_hooks, torch_s._global_forward_pre_hooks, torch_s._global_backward_hooks,
                  torch_s._global_backward_pre_hooks):  # fmt: skip
        code += hooks.values()
    for whole in (module, criterion):
        if not isinstance(whole, Module):
            code.append(whole)
            continue
        for part in whole.modules():
            code.append(type(part))
            for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
                code += hooks.values()
            code += [forward] if (forward := vars(part).get("forward")) else []
        for parameter in whole.parameters():
            code += [*(parameter._backward_hooks or {}).values(), *(parameter._post_accumulate_grad_hooks or {}).values()]
    return code


def draws_on_host(code: list[Any]) -> bool:
    """Whether a forward may draw from NumPy or Python: where anybody's own code runs in it, be it a hook."""
    return any((getattr(one, "__module__", None) or "").partition(".")[0] not in TORCH_ALONE for one in code)


def draws(code: list[Any]) -> bool:
    """Whether a forward may draw at all: unless all of it is layers of exactly these types, or says `draws = False`."""
    from torch import nn

    quiet = {getattr(nn, name) for name in DRAW_NOTHING}
    return draws_on_host(code) or any(one not in quiet and vars(one).get("draws") is not False for one in code)


def has_step_hooks(optimizer: Any) -> bool:
    """Whether somebody's code runs around the steps of `optimizer`: torch keeps such hooks with it, and for all optimizers."""
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
                or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)  # fmt: skip


def seeder_of(value: object) -> Any:
    """What seeds a generator that somebody keeps for himself, as timm's kron does; None for anything else.

    A checkpoint need not hold such a generator's state then.
    """
    import torch

    if isinstance(value, random.Random):
        return value.seed
    return value.manual_seed if isinstance(value, torch.Generator) else None


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed torch, NumPy and Python for one draw from a dataset; `index` is the sampler's virtual index."""
    import torch

    key = seed_of("sample", seed, epoch, index)
    torch.default_generator.manual_seed(key)
    seed_host(key)


@contextmanager
def isolated_generators() -> Iterator[None]:
    """Leave the global generators of torch (CPU), NumPy and Python as they were, whatever is drawn inside."""
    import numpy
    import torch

    states = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        numpy.random.set_state(states[1])
        random.setstate(states[2])
