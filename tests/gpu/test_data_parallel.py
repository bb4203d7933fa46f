"""parallel=dp over several devices is one device's training: the articles' own case."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from harness import summary
from jobs import Network, apart, job, on_cpu, on_gpus
from pretended import pretend

from isobatch import launch
from isobatch.errors import ConfigError

pytestmark = pytest.mark.gpu_pretended

LEVELS = {
    "fp32": (), "bf16": ("precision=bf16",), "amp_bf16": ("precision=amp", "precision.dtype=bfloat16"),
    "amp": ("precision=amp", "precision.dtype=float16", "precision.loss_scale=1024"),
    "O2": ("precision=O2",), "O3": ("precision=O3",),
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory):
    """Level of precision -> the training on one CPU."""
    return cache(lambda level: on_cpu(tmp_path_factory.mktemp(level), job(*LEVELS[level])))


@pytest.mark.parametrize(("devices", "level"), [
    (2, "fp32"), (2, "amp"), (4, "fp32"),
    *(pytest.param(*case, marks=pytest.mark.slow)  # test_matrix.py has them too
      for case in (*((2, level) for level in ("bf16", "amp_bf16", "O2", "O3")), (3, "fp32"), (3, "bf16"))),
])  # fmt: skip
def test_several_devices_give_the_weights_of_one(tmp_path: Path, alone, devices: int, level: str) -> None:
    """Four shards: 2 micro steps over 2 devices, 2 over 3 (the second on one of them), 1 over 4."""
    several = on_gpus(tmp_path / "dp", job(*LEVELS[level], "parallel=dp"), devices)
    assert several.summary["plan"]["num_replicas"] == devices
    assert apart(alone(level), several) < (1e-6 if level == "fp32" else 4e-3)


@pytest.mark.parametrize(("level", "dtype"), [("bf16", torch.bfloat16), ("amp", torch.float16), ("fp32", torch.float32)])
def test_every_replica_computes_in_the_dtype_of_its_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str,
                                                          dtype: torch.dtype) -> None:  # fmt: skip
    seen, forward = [], Network.forward

    def watched(self, images):
        made = forward(self, images)
        seen.append((images.device.index, self.training, made.dtype))
        return made

    monkeypatch.setattr(Network, "forward", watched)
    on_gpus(tmp_path, job(*LEVELS[level], "parallel=dp", "steps=1", "eval_every=1"), 2)
    assert set(seen) == {(device, training, dtype) for device in (0, 1) for training in (True, False)}


def test_three_of_four_devices_in_the_order_that_was_asked_for(tmp_path: Path, alone) -> None:
    """As `python train.py parallel=dp parallel.devices=[0,1,3]` runs it, from the launcher on."""
    made = job("parallel=dp", "parallel.devices=[0,1,3]")
    with pretend(4) as machine:
        launch.run(made, tmp_path)
        assert [machine.visible()[i] for i in range(3)] == [0, 1, 3] and torch.cuda.device_count() == 3
    assert not machine.faults
    assert all(machine.peak[i] > 0 for i in range(3)) and machine.peak[3] == 0
    told, expected = summary(tmp_path), alone("fp32").summary
    assert told["plan"]["num_replicas"] == 3
    for key, value in expected["final"].items():
        assert told["final"][key] == pytest.approx(value, abs=1e-6)


def test_a_device_without_a_shard_waits(tmp_path: Path) -> None:
    """Five shards over four devices: the second micro step has one shard, and the tail window fewer than devices."""
    words = "batch.effective=24", "batch.micro=5", "batch.shard=null"
    several = on_gpus(tmp_path / "dp", job(*words, "parallel=dp"), 4)
    assert apart(on_cpu(tmp_path / "one", job(*words)), several) < 1e-6


def test_evaluation_uses_all_devices_and_sums_as_one(tmp_path: Path, alone, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, forward = [], Network.forward

    def watched(self, images):
        if not self.training and len(images) > 2:  # not what is looked at before training
            seen.append((images.device.index, len(images)))
        return forward(self, images)

    monkeypatch.setattr(Network, "forward", watched)
    several = on_gpus(tmp_path, job("parallel=dp", "steps=2", "eval_every=2"), 2)
    assert seen == [(0, 7), (1, 7), (0, 6)]
    monkeypatch.undo()
    assert several.rows[-1]["eval/loss"] == pytest.approx(alone("fp32").rows[2]["eval/loss"], abs=1e-6)
    assert several.machine is not None and several.machine.waits_in("evaluate/evaluator.py") == 1


def test_what_runs_per_micro_step_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    """Statistics: one copy to each device, one mean, one copy back; not one of each per layer."""
    counts = {}
    for depth in (1, 3):
        words = "model=mlp", "model.norm=true", "model.width=8", f"model.depth={depth}", "parallel=dp", "eval_every=9"
        runs = [on_gpus(tmp_path / f"{depth}{kind}", job(*words, f"model.batch_norm={kind}", "steps=1", probe=False), 2)
                for kind in ("shard", "frozen")]  # fmt: skip
        counts[depth] = [run.machine.launches for run in runs]
    for name in ("stack", "mean", "cat", "_foreach_copy", "_to_copy"):
        learned, frozen = ([kinds[i][name] for kinds in counts.values()] for i in (0, 1))
        assert learned[0] - frozen[0] == learned[1] - frozen[1], name


def test_what_is_compiled_for_one_device_is_refused_on_several(tmp_path: Path) -> None:
    with pretend(2), pytest.raises(ConfigError, match=r"compile.*parallel=ddp"):
        launch.job.load_target(launch.job.TARGET)(job("parallel=dp", "compile=true"), tmp_path, launch.job.Ranks())
