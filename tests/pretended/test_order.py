"""Streams, events, pinned memory and threads of the pretended devices: what may be looked at, and when."""

from __future__ import annotations

import threading

import pytest
import torch

from pretended import Machine, strictly

LATE = "used on a stream that did not wait for its writer"
FREED = "freed while another stream may still use it: no record_stream"
OVERWRITTEN = "pinned memory written before its copy to the device has ended"


def faults(gpu: Machine) -> list[str]:
    """What was found; forgotten, so that the fixture does not complain."""
    found = [what for what, where in gpu.faults if where.startswith("pretended/test_order.py:")]
    gpu.faults.clear()
    return found


def test_a_stream_has_to_wait_for_the_writer(gpu: Machine) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        made = torch.ones(2, device="cuda")
    assert made.sum() == 2 and faults(gpu) == [LATE]
    torch.cuda.current_stream().wait_event(side.record_event())
    assert made.sum() == 2 and faults(gpu) == []
    made.add_(1)
    with torch.cuda.stream(side):
        made + 1
    assert faults(gpu) == [LATE]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made + 1
    assert gpu.streams == 1


def test_what_the_host_has_waited_for_is_there_for_all(gpu: Machine) -> None:
    side = torch.cuda.Stream()
    sent = torch.ones(2).to("cuda")  # a copy that blocks
    with torch.cuda.stream(side):
        sent + 1
    assert faults(gpu) == []
    made = torch.ones(2, device="cuda")
    with torch.cuda.stream(side):
        made + 1
    assert faults(gpu) == [LATE]
    for tensor in (sent, made):
        tensor.record_stream(side)


def test_what_a_stream_has_waited_for_others_get_through_it(gpu: Machine) -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(a):
        made = torch.ones(2, device="cuda")
    b.wait_stream(a)
    torch.cuda.current_stream().wait_stream(b)
    made + 1
    made.record_stream(torch.cuda.current_stream())


def test_memory_of_a_side_stream_is_recorded_or_waited_for(gpu: Machine) -> None:
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()

    def used(record: bool = False, wait: bool = False) -> None:
        with torch.cuda.stream(side):
            made = torch.ones(2, device="cuda")
        current.wait_stream(side)
        made + 1
        if record:
            made.record_stream(current)
        if wait:
            side.wait_stream(current)

    used()
    assert faults(gpu) == [FREED]
    used(record=True)
    used(wait=True)
    assert faults(gpu) == []


def test_an_asynchronous_copy_is_nothing_until_it_has_been_waited_for(gpu: Machine) -> None:
    source, host = torch.ones(2, device="cuda"), torch.zeros(2, pin_memory=True)
    host.copy_(source, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    assert host.isnan().all()
    source.add_(1)  # queued behind the copy
    event.synchronize()
    assert host.tolist() == [1, 1]
    late = source.to("cpu", non_blocking=True)
    assert late.isnan().all()
    torch.cuda.synchronize()
    assert late.tolist() == [2, 2]
    numbers = torch.zeros(2, dtype=torch.int64, pin_memory=True)
    numbers.copy_(source, non_blocking=True)
    assert numbers.tolist() != [2, 2] and source.sum().item() == 4 and numbers.tolist() == [2, 2]


def test_a_copy_into_pageable_memory_waits_whatever_is_asked_for(gpu: Machine) -> None:
    host = torch.zeros(2)
    host.copy_(torch.ones(2, device="cuda"), non_blocking=True)
    assert host.tolist() == [1, 1] and gpu.waits_in("pretended") == 1


def test_pinned_memory_stays_as_it_is_until_it_has_been_sent(gpu: Machine) -> None:
    host = torch.ones(2, pin_memory=True)
    assert host.is_pinned() and torch.ones(2).pin_memory().is_pinned() and not torch.ones(2).is_pinned()
    host.to("cuda", non_blocking=True)
    host.zero_()
    assert faults(gpu) == [OVERWRITTEN]
    torch.cuda.synchronize()
    host.fill_(2.0)
    torch.empty(2, device="cuda").copy_(host, non_blocking=True)
    host += 1
    assert faults(gpu) == [OVERWRITTEN]
    torch.ones(2, device="cuda").copy_(host)
    host += 1


@pytest.mark.gpu_pretended(2)
def test_the_current_device_and_autocast_belong_to_the_thread(gpu: Machine) -> None:
    torch.cuda.set_device(1)
    seen = []
    with torch.autocast("cuda", dtype=torch.bfloat16):
        thread = threading.Thread(target=lambda: seen.extend((torch.cuda.current_device(), torch.get_autocast_dtype("cuda"))))
        thread.start(), thread.join()
        assert torch.get_autocast_dtype("cuda") is torch.bfloat16
        assert torch.nn.Linear(2, 2).to("cuda")(torch.ones(1, 2, device="cuda")).dtype is torch.bfloat16
    assert seen == [0, torch.float16]


@pytest.mark.gpu_pretended(3)
def test_data_parallel_runs_torchs_own_threads_over_the_devices(gpu: Machine) -> None:
    seen = []

    class Layer(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append((inputs.device.index, self.weight.device.index, torch.cuda.current_device(), torch.is_grad_enabled()))
            return super().forward(inputs)

    layer = Layer(2, 2).to("cuda")
    inputs = torch.randn(6, 2, device="cuda")
    torch.nn.DataParallel(layer)(inputs).sum().backward()
    assert seen == [(i, i, i, True) for i in range(3)]
    gradient, layer.weight.grad = layer.weight.grad, None
    layer(inputs).sum().backward()
    torch.testing.assert_close(gradient, layer.weight.grad)


def test_a_fault_fails_the_test_that_uses_the_fixture() -> None:
    def late() -> None:
        with strictly():
            with torch.cuda.stream(torch.cuda.Stream()):
                made = torch.ones(2, device="cuda")
            made + 1

    with pytest.raises(AssertionError, match=LATE):
        late()
