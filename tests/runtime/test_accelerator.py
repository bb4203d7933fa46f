"""Devices of other kinds, as far as a machine without one can tell: who seeds, who waits, who has no float64."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import plain, summary, train

from isobatch import config as configuration
from isobatch.batch_plan import BatchPlan, resolve_batch
from isobatch.errors import ConfigError
from isobatch.launch import job
from isobatch.reduction import TABLE, Exact, exact, fast
from isobatch.runtime import accelerator, distributed
from isobatch.runtime.distributed import Ranks, choose_backend, choose_device
from isobatch.runtime.randomness import ShardSeeder

MPS, XPU, CPU = torch.device("mps"), torch.device("xpu", 1), torch.device("cpu")


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with two of Intel's, as far as torch's module and torch.accelerator tell."""
    found = SimpleNamespace(
        default_generators=(torch.Generator(), torch.Generator()), waited=[], chosen=[], freed=0, reset=[],
        get_device_name=lambda device: "Pretended Max", get_device_properties=lambda device: SimpleNamespace(has_fp64=False),
    )  # fmt: skip
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: found)
    monkeypatch.setattr(torch.xpu, "get_device_properties", found.get_device_properties)
    for name, value in {
        "current_accelerator": lambda check_available=False: torch.device("xpu"), "device_count": lambda: 2,
        "set_device_index": found.chosen.append, "synchronize": found.waited.append,
        "max_memory_allocated": lambda device: 3 * 2**20, "reset_peak_memory_stats": found.reset.append,
        "empty_cache": lambda: found.__dict__.update(freed=found.freed + 1),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.accelerator, name, value)
    return found


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """Apple's generator, and a torch that makes no float64 there."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.mps, "_get_default_mps_generator", lambda: generator)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 5 * 2**20)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: None)
    return generator


def test_dropout_of_a_shard_is_drawn_by_the_devices_own_generator(xpu: Any, mps: torch.Generator) -> None:
    state = torch.default_generator.get_state()
    seed = ShardSeeder(7, [XPU])
    seed(3, (5,))
    assert xpu.default_generators[1].initial_seed() != xpu.default_generators[0].initial_seed()
    drawn = torch.rand(4, generator=xpu.default_generators[1])
    ShardSeeder(7, [MPS])(3, (5,))
    assert torch.equal(torch.rand(4, generator=mps), drawn)  # keyed by seed, step and shard, on any device
    ShardSeeder(7, [MPS])(3, (6,))
    assert not torch.equal(torch.rand(4, generator=mps), drawn)
    assert torch.equal(torch.default_generator.get_state(), state)  # the CPU's stays as it was


def test_a_cuda_card_that_nobody_used_yet_is_started_for_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(default_generators=())
    module.init = lambda: setattr(module, "default_generators", (torch.Generator(),))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert accelerator.generator(torch.device("cuda", 0)) is module.default_generators[0]


def test_a_device_without_generators_is_no_silent_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.raises(ConfigError, match="no random generators"):
        accelerator.generator(XPU)


@pytest.mark.parametrize("device", [XPU, MPS, CPU])
def test_a_look_ahead_leaves_the_generators_of_any_device_as_they_were(device: torch.device, xpu: Any, mps: Any) -> None:
    own = accelerator.generator(device)
    before, host = own.get_state(), torch.default_generator.get_state()
    with accelerator.kept_generators([device]):
        torch.rand(3, generator=own)
        torch.rand(3)
    assert torch.equal(own.get_state(), before) and torch.equal(torch.default_generator.get_state(), host)


def test_clocks_and_memory_are_the_devices_own(xpu: Any, mps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator.wait(XPU)
    accelerator.wait(CPU)
    assert xpu.waited == [XPU]
    assert accelerator.peak_memory_mb(XPU) == 3.0 and accelerator.peak_memory_mb(MPS) == 5.0
    for device in (CPU, MPS, XPU):
        accelerator.forget_peak_memory(device)
        accelerator.empty_cache(device)
    assert xpu.reset == [XPU] and xpu.freed == 1
    assert accelerator.name(XPU) == "xpu:1 (Pretended Max)" and accelerator.model_name(XPU) == "Pretended Max"
    assert accelerator.name(CPU) == "cpu" and accelerator.model_name(CPU) == torch.backends.cpu.get_cpu_capability()
    here = accelerator.peak_memory_mb(CPU)
    monkeypatch.setattr(sys, "platform", "darwin")  # counts bytes where Linux counts KiB
    assert accelerator.peak_memory_mb(CPU) == pytest.approx(here / 1024, rel=0.05)


def test_no_float64_where_a_device_has_none(mps: Any, xpu: Any) -> None:
    assert accelerator.widest(CPU) == accelerator.widest(torch.device("cuda")) == torch.float64
    assert accelerator.widest(MPS) == accelerator.widest(XPU) == torch.float32


def test_losses_are_never_float64_on_a_device_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reducers' and the evaluation's numbers, on a device whose widest type is said to be float32."""
    plan = BatchPlan(resolve_batch(8, 4, None, 1), 16, "keep")
    model = torch.nn.Linear(2, 2)
    working = SimpleNamespace(module=model, pairs=[])
    strategy = configuration.load(plain()).parallel
    for module in (fast, exact):
        monkeypatch.setattr(module, "widest", lambda device: torch.float32)
    for options in (TABLE["fast"](), Exact(method="tree")):
        reducer: Any = options.build(working, strategy, plan, Ranks(), CPU)  # type: ignore[arg-type]
        reducer.begin(plan.window(0), None)
        assert reducer.window_loss().dtype == torch.float32
    with pytest.raises(ConfigError, match=r"method=bin64: bin64 adds in float64, which cpu does not have; set .*tree"):
        Exact(method="bin64").build(working, strategy, plan, Ranks(), CPU)  # type: ignore[arg-type]


def test_evaluation_without_float64_gives_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("logger=none", "model=linear", "epochs=null", "steps=1", "threads=1")
    train(tmp_path / "a", *words)
    monkeypatch.setattr(accelerator, "widest", lambda device: torch.float32)
    train(tmp_path / "b", *words)
    wide, narrow = (summary(tmp_path / name)["final"] for name in "ab")
    assert narrow["eval/accuracy"] == wide["eval/accuracy"]
    assert narrow["eval/loss"] == pytest.approx(wide["eval/loss"], rel=1e-6)


@pytest.mark.parametrize(("kind", "wanted"), [
    ("cpu", "gloo"), ("mps", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl"),
    ("npu", "cpu:gloo,npu:hccl"),
])  # fmt: skip
def test_ranks_meet_over_the_devices_own_backend(kind: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "npu", "hccl")  # as torch_npu registers it
    assert choose_backend(None, kind) == wanted
    assert choose_backend("gloo", kind) == "gloo"
    foreign = "nccl" if kind != "cuda" else "xccl"
    with pytest.raises(ConfigError, match=f"parallel.backend={foreign}: {foreign} needs .* works on {kind}; set"):
        choose_backend(foreign, kind)


@pytest.mark.parametrize(("backend", "given"), [("cpu:gloo,cuda:nccl", True), ("gloo", False), ("cpu:gloo,xpu:xccl", False)])
def test_nccl_is_told_the_device_at_the_start(backend: str, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: seen.update(options, name=name))
    device = torch.device("cuda", 1)
    distributed.create_group(Ranks(1, 2, 1, 2), backend, None, 60, device)
    assert seen["device_id"] == (device if given else None) and seen["name"] == backend


def test_a_job_of_several_ranks_hands_its_device_to_the_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(distributed, "create_group", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(distributed, "choose_device", lambda ranks, asked: torch.device(asked, ranks.local_rank))
    asked = {"parallel": {"backend": None}, "device": "cuda"}
    job._in_group(lambda *_: None, asked, tmp_path, Ranks(1, 2, 1, 2), lambda: "store")
    assert seen == [(Ranks(1, 2, 1, 2), "cpu:gloo,cuda:nccl", "store", 600, torch.device("cuda", 1))]


def test_the_device_is_what_is_there_or_what_is_asked_for(xpu: Any) -> None:
    assert choose_device(Ranks(1, 2, 1, 2)) == choose_device(Ranks(1, 2, 1, 2), "xpu") == torch.device("xpu", 1)
    assert xpu.chosen == [torch.device("xpu", 1)] * 2
    assert choose_device(Ranks(1, 2, 1, 2), "cpu") == CPU and len(xpu.chosen) == 2
    with pytest.raises(ConfigError, match="device=cuda: torch finds xpu and no cuda on this machine; set device=xpu"):
        choose_device(Ranks(), "cuda")


def test_a_device_that_is_not_there_is_refused_before_anything(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"device=mps: torch finds no accelerator on this machine; set device=cpu, or null"):
        train(tmp_path, "logger=none", "model=linear", "device=mps")
    assert not (tmp_path / "config.yaml").exists() and not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(("words", "line"), [
    (("device=tpu",), "device=tpu: is not a valid choice; choose one of null, cpu, cuda, mps, xpu"),
    (("device=cpu", "parallel=ddp", "parallel.devices=[0,1]"), "parallel.devices.*device=cpu uses none"),
    (("batch.eval=0",), "batch.eval=0: must be positive"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        configuration.load(plain(*words))


def test_somebody_with_a_gpu_may_want_the_cpu(tmp_path: Path, gpu: Any) -> None:
    train(tmp_path, "logger=none", "model=linear", "epochs=null", "steps=2", "threads=1", "device=cpu", "parallel=dp")
    assert summary(tmp_path)["ranks"][0]["device"] == "cpu" and gpu.started == 0


@pytest.mark.parametrize("loss", ["cross_entropy", "output_sum"])
def test_an_evaluation_says_the_same_in_batches_of_any_size(tmp_path: Path, loss: str) -> None:
    found = {}
    for size in ("null", "7", "100", "1000"):
        folder = tmp_path / size
        train(folder, "logger=none", "model=linear", "epochs=null", "steps=2", "threads=1", f"loss={loss}",
              f"batch.eval={size}")  # fmt: skip
        found[size] = summary(folder)["final"]
    for size in ("7", "100", "1000"):
        assert found[size] == pytest.approx(found["null"], rel=1e-5)
        assert found[size].get("eval/accuracy") == found["null"].get("eval/accuracy")
