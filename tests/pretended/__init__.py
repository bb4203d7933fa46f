"""GPUs that are not there, for tests on a machine without one: CPU tensors that say `cuda:0`, and are held to it.

    with pretend(devices=2) as gpu:
        ...  # the program under test: torch.cuda and torch.accelerator find two devices
    gpu.syncs, gpu.faults, gpu.launches

In tests: the fixture `gpu` (tests/conftest.py), `@pytest.mark.gpu_pretended(3)` for three devices.

All arithmetic is the CPU's own: values, gradients, fused optimizers, gloo and DDP are real. On top of it a
TorchDispatchMode notes of every storage which device it is on, and checks each operator:

- tensors of different devices in one operator raise, as CUDA does (numbers of the host may be mixed in)
- what makes the host wait (`item`, `tolist`, blocking copies either way, `nonzero`, ...) is listed with the line that asked
- a copy to the host that does not block arrives when its stream or event has been waited for; before, the memory is NaN
- use on a stream that has not waited for the writer, memory freed while another stream may still use it (record_stream), and
  pinned memory written over before it was sent are faults
- every device has a random generator of its own, and a generator of another device raises
- a label out of range, or `gpu.dead = "..."`, and every use of a device raises from then on
- of kernels that add in any order torch's warning (or refusal) is heard, where deterministic ones were asked for
- memory is counted (allocated, peak) and can be limited: beyond it is torch.OutOfMemoryError

What it cannot show: kernels (precision, the order of their sums, missing ones), speed, what the caching allocator wastes,
NCCL, CUDA graphs, torch.compile, the threads of the CUDA autograd engine, autocast's CUDA lists (the CPU's are used).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from isobatch.audit import digest
from pretended import machine, names, replicas, tensors
from pretended.machine import Machine
from pretended.watch import Watch

__all__ = ["Machine", "pretend", "strictly"]


@contextlib.contextmanager
def pretend(devices: int = 1, memory: int | None = None) -> Iterator[Machine]:
    """Inside, this process has `devices` GPUs with `memory` bytes each (None: as many as wanted)."""
    assert not machine._HERE, "one machine at a time"
    machine._HERE.append(found := Machine.__new__(Machine))
    found.local = machine.Local()
    try:
        found.__init__(devices, memory)  # type: ignore[misc]  # its generators ask it for their device
        found.watch = Watch(found)
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
            for patch in (*names.patches(), *tensors.patches(), *replicas.patches()):
                stack.enter_context(patch)
            stack.enter_context(found.watch)
            yield found
    finally:
        machine._HERE.pop()
        digest.forget()  # memory of this machine


@contextlib.contextmanager
def strictly(devices: int = 1, memory: int | None = None) -> Iterator[Machine]:
    """The same, with an AssertionError at the end if there were faults."""
    with pretend(devices, memory) as found:
        yield found
    assert not found.faults, dict(found.faults)
