"""`profile=time`: the parts of a step by the clock, with the device waited for between them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from isobatch.profile.profiler import Profiler
from isobatch.runtime import accelerator
from isobatch.runtime.randomness import isolated_generators

PARTS = ("data", "forward", "backward", "reduction", "update")


class Stopwatch(Profiler):
    """Puts clocks around what a step calls, by replacing it for the length of a training.

    data: waiting for a window's batches, on the device. forward: the network. backward: criterion and backward, with the
    exchange that runs beside it. reduction: what is left of the exchange. update: from there to the optimizer's end.
    """

    def __init__(self, device: torch.device, peak_tflops: float | None):
        self.device, self.peak = device, peak_tflops
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = self.samples = 0
        self.flops: float | None = None  # of a sample, forward and backward
        self.since = 0.0

    def windows(self, windows: Iterator[Any], state: Any, parts: Any) -> Iterator[Any]:
        original = parts.precision, parts.micro_step
        parts.precision = _Timed(parts.precision, self._forward)
        parts.micro_step = self._micro_step(original[1])
        finish, step = parts.reducer.finish, state.scaler.step
        parts.reducer.finish = self._around("reduction", finish)
        state.scaler.step = self._around("update", step, since=True)
        try:
            while True:
                begun = self._now()
                window = next(windows, None)
                self.seconds["data"] += self._now() - begun
                if window is None:
                    return
                batches = window.micro_batches
                window.micro_batches = self._read(batches, parts) if iter(batches) is batches else _Again(self, batches, parts)
                self.steps += 1
                yield window
        finally:
            parts.precision, parts.micro_step = original
            del parts.reducer.finish, state.scaler.step  # the class's own again

    def _read(self, batches: Any, parts: Any) -> Iterator[Any]:
        source = iter(batches)
        while True:
            begun = self._now()
            micro = next(source, None)
            self.seconds["data"] += self._now() - begun
            if micro is None:
                return
            if self.flops is None:
                self.flops = flops_of(parts, micro)
            self.samples += micro.lanes.samples
            yield micro

    @contextmanager
    def _forward(self, around: Any) -> Iterator[None]:
        begun = self._now()
        with around:
            yield
        self.seconds["forward"] += self._now() - begun

    def _micro_step(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            forward, begun = self.seconds["forward"], self._now()
            result = inner(*given)
            self.seconds["backward"] += self._now() - begun - (self.seconds["forward"] - forward)
            return result

        return timed

    def _around(self, part: str, inner: Callable[..., Any], since: bool = False) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            begun = self.since if since else self._now()
            result = inner(*given)
            self.since = self._now()
            self.seconds[part] += self.since - begun
            return result

        return timed

    def _now(self) -> float:
        accelerator.wait(self.device)
        return time.perf_counter()

    def row(self) -> dict[str, float]:
        total = sum(self.seconds.values())
        found = {f"time/{part}_ms": 1e3 * seconds / self.steps for part, seconds in self.seconds.items()}
        if self.flops and total:
            found["perf/tflops"] = self.flops * self.samples / total / 1e12
            if self.peak:
                found["perf/mfu"] = found["perf/tflops"] / self.peak
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = self.samples = 0
        return found


class _Again:
    """Micro batches that can be gone through more than once."""

    def __init__(self, watch: Stopwatch, batches: Any, parts: Any):
        self.watch, self.batches, self.parts = watch, batches, parts

    def __iter__(self) -> Iterator[Any]:
        return self.watch._read(self.batches, self.parts)


class _Timed:
    """`precision` whose autocast is the forward's clock: it is around the network, and around nothing else."""

    def __init__(self, precision: Any, around: Callable[[Any], Any]):
        self._precision, self._around = precision, around

    def autocast(self, device: torch.device) -> Any:
        return self._around(self._precision.autocast(device))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._precision, name)


def flops_of(parts: Any, micro: Any) -> float:
    """Floating point operations of one sample's forward and backward, by torch's own count of its operators, on a copy of the
    network; 0 where it cannot be copied (weights in parts) or answers no tensor."""
    from torch.utils.flop_counter import FlopCounterMode

    few = min(2, len(micro.inputs))
    try:
        with isolated_generators(), accelerator.kept_generators([micro.inputs.device]):
            network = copy.deepcopy(parts.working.module)
            with FlopCounterMode(display=False) as counted:
                with parts.precision._precision.autocast(parts.device):
                    output = network(micro.inputs[:few])
                output.float().sum().backward()
        return counted.get_total_flops() / few
    except Exception:  # of every kind: what is counted is not what is trained
        return 0.0
