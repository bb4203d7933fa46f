"""Ways to train that take turns on one device: the framework's own loop, a hand-written one, and timm's (see gpu.py)."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from loop import isobatch_loop

from isobatch.runtime import accelerator
from isobatch.runtime.distributed import Ranks

MB = 2**20


class Enough(Exception):
    """Ends a loop after a step, without what a training does at its end."""


class Contender:
    """
    Args:
        advance: gives out that many steps, and returns without waiting for the device.
        samples: of a step.
    """

    def __init__(self, advance: Callable[[int], None], samples: int):
        self.advance, self.samples = advance, samples
        self.whole: list[float] = []  # seconds a step, of every turn
        self.given_out: list[float] = []  # of these, until the host had given out all
        self.peak = self.rest = 0

    def turn(self, device: torch.device, steps: int) -> None:
        held = allocated(device)
        accelerator.forget_peak_memory(device)
        began = time.perf_counter()
        self.advance(steps)
        self.given_out.append((time.perf_counter() - began) / steps)
        accelerator.wait(device)
        self.whole.append((time.perf_counter() - began) / steps)
        self.peak = max(self.peak, self.rest + peak(device) - held)

    @property
    def rate(self) -> float:
        return self.samples / statistics.median(self.whole)

    def told(self) -> str:
        host = statistics.median(self.given_out) / statistics.median(self.whole)
        return f"{self.rate:,.0f}/s, peak {self.peak / MB:,.0f} MB, host busy {100 * host:.0f} %"


def in_turns(made: dict[str, Callable[[], Contender]], device: torch.device, turns: int, steps: int,
             warm: int) -> dict[str, Contender]:  # fmt: skip
    """Build all, warm them up, and let them take turns."""
    found: dict[str, Contender] = {}
    for name, build in made.items():
        before = allocated(device)
        found[name] = build()
        found[name].advance(warm)
        accelerator.wait(device)
        found[name].rest = allocated(device) - before
    for _ in range(turns):
        for contender in found.values():
            contender.turn(device, steps)
    return found


def ours(words: list[str], folder: Path, samples: int) -> tuple[Any, Contender]:
    """The framework's Loop, and it as a contender."""
    loop, _ = isobatch_loop(words, Ranks(), folder)
    loop.audit = loop.pace = None  # asked of a training once, and not in every turn

    def advance(steps: int) -> None:
        left = iter(range(steps - 1))

        def asked() -> int:
            if next(left, None) is None:
                raise Enough
            return 0

        loop.stop_requested = asked
        with suppress(Enough):
            loop.train()

    return loop, Contender(advance, samples)


def by_hand(loop: Any, dtype: torch.dtype, samples: int, timms: bool = False, compiled: bool = False) -> Contender:
    """The training of `loop`, one micro step a window, in one's own lines.

    Args:
        dtype: of autocast; float16 has its loss scaled. timms: with the optimizer and the scaler of timm's training script.
    """
    model: Any = copy.deepcopy(loop.state.model)
    ((inputs, targets),) = loop.feed.source.batches_
    kind, criterion = inputs.device.type, torch.nn.CrossEntropyLoss()
    scaler: Any = None
    if timms:
        from timm.optim import create_optimizer_v2
        from timm.utils import NativeScaler

        optimizer = create_optimizer_v2(model, opt="sgd", lr=0.001, momentum=0.9, weight_decay=0.0)
        scaler = NativeScaler(device=kind) if dtype == torch.float16 else None
    else:
        switches = {k: v for k, v in loop.state.optimizer.defaults.items() if k in ("momentum", "nesterov", "fused")}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, **switches)
        scaler = torch.amp.GradScaler(kind) if dtype == torch.float16 else None
    model.train()
    if compiled:
        model.compile()

    def advance(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast(kind, dtype):
                loss = criterion(model(inputs), targets)
            optimizer.zero_grad()
            if scaler is None:
                loss.backward()
                optimizer.step()
            elif timms:
                scaler(loss, optimizer, parameters=model.parameters())
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

    return Contender(advance, samples)


def allocated(device: torch.device) -> int:
    return 0 if device.type == "cpu" else int(torch.accelerator.memory_allocated(device))


def peak(device: torch.device) -> int:
    return 0 if device.type == "cpu" else int(torch.accelerator.max_memory_allocated(device))
