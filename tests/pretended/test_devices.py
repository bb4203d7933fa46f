"""The pretended devices themselves: what goes where, what does not go together, what waits, whose random numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pretended import Machine, pretend

CUDA = torch.device("cuda:0")
HERE = "pretended/test_devices.py"


def test_outside_there_is_no_device_and_nothing_is_left_of_it() -> None:
    before = torch.Tensor.to, torch.cuda.is_available(), torch.Generator, torch.autocast
    with pretend(2):
        assert torch.cuda.is_available() and torch.accelerator.device_count() == 2
    assert before == (torch.Tensor.to, torch.cuda.is_available(), torch.Generator, torch.autocast)
    assert not torch.cuda.is_available()


@pytest.mark.gpu_pretended(4)
def test_devices_are_counted_and_chosen(gpu: Machine) -> None:
    assert torch.cuda.device_count() == 4 and torch.cuda.current_device() == 0
    torch.accelerator.set_device_index(2)
    assert torch.zeros(1, device="cuda").device == torch.device("cuda:2")
    with torch.cuda.device(3):
        assert torch.zeros(1).cuda().device == torch.device("cuda:3")
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        torch.cuda.set_device(4)


def test_results_are_where_their_operands_are(gpu: Machine) -> None:
    a = torch.ones(3, device="cuda")
    for made in (a + 1, a[1:], a.view(3, 1), torch.zeros_like(a), a.new_empty(2), a.sum(), copy.deepcopy(a), a.clone(),
                 torch.tensor([1.0], device="cuda"), torch.as_tensor([2], device="cuda"), a.half(), a.to(torch.float64),
                 nn.Parameter(a).data, torch.empty(2, device=a.device)):  # fmt: skip
        assert made.device == CUDA and made.is_cuda and made.get_device() == 0
    assert a.to("cpu").device.type == a.cpu().device.type == "cpu" and torch.zeros(2).device.type == "cpu"
    assert torch.zeros(2).to(a).device == CUDA and a.to(a.device) is a and a.to(CUDA, copy=True) is not a


def test_a_module_keeps_its_parameters_and_gradients_come_back_to_the_host(gpu: Machine) -> None:
    layer = nn.Linear(2, 2)
    before = dict(layer.named_parameters())
    layer.to("cuda")
    assert all(before[name] is p and p.is_cuda and p.is_leaf for name, p in layer.named_parameters())
    host = torch.ones(1, 2, requires_grad=True)
    layer(host.to("cuda")).sum().backward()
    assert host.grad is not None and host.grad.device.type == "cpu" and layer.weight.grad.is_cuda


@pytest.mark.gpu_pretended(2)
def test_tensors_of_different_devices_do_not_mix(gpu: Machine) -> None:
    here, there, host = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1"), torch.ones(2)
    for other in (there, host):
        with pytest.raises(RuntimeError, match="same device"):
            here + other
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([here, other])
    with pytest.raises(RuntimeError, match="same device"):
        torch._foreach_add_([here], [there])
    with pytest.raises(RuntimeError, match="same device"):
        nn.Linear(2, 2)(here)
    assert (here * torch.tensor(2.0)).tolist() == [2, 2]  # a number of the host
    here.copy_(there), there.copy_(host)
    assert here.device != there.device


def test_what_makes_the_host_wait_is_listed_with_its_line(gpu: Machine) -> None:
    a = torch.arange(3.0, device="cuda")
    gpu.forget()
    a.sum(), a.mul_(2), a[torch.zeros(1, dtype=torch.long, device="cuda")], torch.zeros(2, device="cuda"), a.fill_(1.0)
    a.to("cpu", non_blocking=True), torch.zeros(2).to("cuda", non_blocking=True)
    assert not gpu.syncs
    gpu.forget()
    waiting = {
        "_local_scalar_dense": lambda: a.sum().item(), "tolist": a.tolist, "copy to the host": a.cpu,
        "nonzero": a.nonzero, "equal": lambda: torch.equal(a, a),
        "blocking copy to the device": lambda: torch.ones(3).to("cuda"),
        "index": lambda: a[a > 0], "index from the host": lambda: a[torch.tensor([0])], "synchronize": torch.cuda.synchronize,
        "synchronize a stream": lambda: torch.cuda.current_stream().synchronize(),
    }  # fmt: skip
    for why, wait in waiting.items():
        gpu.forget()
        wait()
        assert [(found, where.split(":")[0]) for found, where in gpu.syncs] == [(why, HERE)], why
        assert sum(gpu.syncs.values()) == 1
    gpu.forget()
    assert bool(a.sum() > -1) and f"{a}"
    assert gpu.waits_in(HERE) > 1
    with pytest.raises(TypeError, match="numpy"):
        a.numpy()


@pytest.mark.gpu_pretended(2)
def test_every_device_draws_from_its_own_generator(gpu: Machine) -> None:
    torch.manual_seed(1)
    seeded = torch.rand(3)
    torch.manual_seed(1)
    assert torch.rand(3, device="cuda:0").tolist() == torch.rand(3, device="cuda:1").tolist() == seeded.tolist()
    assert torch.rand(3).tolist() == seeded.tolist()  # the host's was not touched by the others
    torch.cuda.default_generators[1].manual_seed(7)
    drawn = torch.rand(3, device="cuda:1")
    assert drawn.tolist() == torch.rand(3, generator=torch.Generator().manual_seed(7)).tolist()
    with torch.random.fork_rng([0]):
        inside = nn.functional.dropout(torch.ones(64, device="cuda:0")).tolist()
    assert inside == nn.functional.dropout(torch.ones(64, device="cuda:0")).tolist()


@pytest.mark.gpu_pretended(2)
def test_a_generator_of_another_device_is_refused(gpu: Machine) -> None:
    host, first = torch.Generator().manual_seed(1), torch.Generator("cuda").manual_seed(1)
    assert (host.device.type, first.device) == ("cpu", CUDA)
    assert torch.rand(2, generator=host).tolist() == torch.rand(2, generator=first, device="cuda").tolist()
    for generator, device in ((host, "cuda"), (first, "cuda:1"), (first, "cpu")):
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(2, generator=generator, device=device)
    with pytest.raises(RuntimeError, match="generator"):
        torch.zeros(2, device="cuda").normal_(generator=host)


def test_a_device_that_died_stays_dead(gpu: Machine) -> None:
    a = torch.ones(2, 3, device="cuda")
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        nn.functional.cross_entropy(a, torch.tensor([0, 3], device="cuda"))
    event = torch.cuda.Event()
    for use in (lambda: a + 1, lambda: a.cpu(), lambda: torch.zeros(1, device="cuda"), torch.cuda.synchronize,
                event.synchronize, event.record, torch.cuda.empty_cache, lambda: torch.ones(1).to("cuda")):  # fmt: skip
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            use()
    assert torch.cuda.max_memory_allocated() > 0 and (torch.ones(2) + 1).tolist() == [2, 2]


def test_memory_is_counted_when_taken_and_when_freed(gpu: Machine) -> None:
    a = torch.zeros(1000, device="cuda")
    assert torch.cuda.memory_allocated() == 4000
    b = (a + 1)[:2]
    del a
    assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (4000, 8000)
    weight = torch.ones(1000, device="cuda", requires_grad=True)
    out = (weight * 2).exp()  # keeps its result for the backward
    loss = out.sum()
    del out, b
    assert torch.cuda.memory_allocated() == 8000 + 4
    loss.backward()
    del loss
    assert torch.cuda.memory_allocated() == 8000  # the weight and its gradient
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 8000


@pytest.mark.gpu_pretended(1, memory=10_000)
def test_a_full_device_says_so(gpu: Machine) -> None:
    a = torch.zeros(2000, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        a + 1
    assert torch.cuda.mem_get_info() == (2000, 10_000)
    del a
    torch.zeros(2400, device="cuda")


def test_launches_are_counted_views_are_none(gpu: Machine) -> None:
    a = torch.ones(4, 4, device="cuda")
    gpu.forget()
    a.view(16)[2:].unsqueeze(0), torch.empty_like(a), a.detach(), a.t()
    assert gpu.started == 0
    torch._foreach_add_([a, a.clone()], 1.0)
    assert gpu.launches == {"clone": 1, "_foreach_add": 1}


@pytest.mark.gpu_pretended(4)
def test_only_visible_devices_are_there_in_their_order(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch.cuda.is_initialized()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert torch.cuda.device_count() == 2
    torch.zeros(1, device="cuda:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # too late
    assert torch.cuda.is_initialized() and torch.cuda.device_count() == 2
    assert [torch.cuda.get_device_properties(i).uuid[:8] for i in range(2)] == ["00000003", "00000001"]
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:2")


def test_no_visible_device_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pretend(2):
        assert not torch.cuda.is_available() and torch.accelerator.current_accelerator(check_available=True) is None
