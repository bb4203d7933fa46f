"""What a training step costs the host on a GPU: how often it waits for the device, and how many kernels it starts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import plain
from jobs import job
from pretended import Machine, pretend

from isobatch.config import load
from isobatch.run import Run
from isobatch.runtime.distributed import Ranks

pytestmark = [
    pytest.mark.gpu_pretended,
    pytest.mark.filterwarnings("ignore:Flash Attention defaults"),
]  # what Loop.audit would have told before
QUIET = "log_every=1000", "eval_every=1000", "steps=1000"


def stepping(folder: Path, machine: Machine, made: dict[str, Any], steps: int = 3, warm: int = 2) -> Any:
    """Train `steps` steps without an end of the run, after `warm` ones; leaves in `machine` what those did."""
    run = Run(load(made), folder, Ranks())
    run.build()
    assert run.loop is not None
    run.loop.total_steps = warm + steps
    windows = run.loop.feed.windows(0, warm + steps)
    from isobatch.train.step import train_step

    for i, data in enumerate(windows):
        if i == warm:
            machine.forget()
        run.loop._set_lr()
        train_step(run.loop.state, run.loop.parts, data)
        run.loop.state.step += 1
    run.files.close()
    return run.loop


# what is chosen -> waits a step
WAITS = {
    "precision=fp32": 0, "precision=tf32": 0, "precision=bf16": 0, "precision=O3": 0, "precision=bf16_pure": 0,
    "max_grad_norm=1": 0, "reduction=exact": 0, "ema=ema": 0, "ema=ema ema.device=cpu": 0, "augment=mixup": 0,
    "augment=mixup augment.mix_mode=elem": 0, "loss=jsd": 0, "parallel=dp": 0, "optimizer=adamw": 0, "data.num_workers=1": 0,
    "loss=distill loss.teacher.arch=resnet10t": 0,
    "precision=amp precision.dtype=float16": 1, "precision=O2": 1, "on_nonfinite=skip": 1,
    "reduction=exact reduction.method=bin64": 1,
}  # fmt: skip


# like others of the table, as far as the host is concerned
LATER = {"precision=tf32", "precision=bf16", "precision=O3", "precision=O2", "loss=jsd", "augment=mixup augment.mix_mode=elem",
         "optimizer=adamw", "ema=ema", "loss=distill loss.teacher.arch=resnet10t"}  # fmt: skip


@pytest.mark.parametrize("words", [pytest.param(w, marks=pytest.mark.slow if w in LATER else ()) for w in WAITS])
def test_host_waits_a_step(tmp_path: Path, words: str) -> None:
    steps = 3
    with pretend(2 if "dp" in words else 1) as machine:
        loop = stepping(tmp_path, machine, job(*QUIET, "batch.effective=28", "sampler.tail=drop", *words.split()), steps)
        loop.feed.source.close()  # its workers would keep this process from ending
        assert sum(machine.syncs.values()) == WAITS[words] * steps, dict(machine.syncs)
        assert not machine.faults, dict(machine.faults)


def resnet(folder: Path, *words: str, shards: int = 1) -> tuple[int, Any]:
    """(launches a step of a small ResNet, the loop)."""
    made = plain(
        "logger=none", "threads=1", "model=timm", "model.arch=resnet10t", "data=synthetic", "data.image_size=32",
        "data.samples=64", "data.eval_samples=4", "batch.effective=8", f"batch.micro={8 // shards}", "epochs=null",
        "optimizer=sgd", "checkpoint=none", "channels_last=false", *QUIET, *words,
    )  # fmt: skip
    with pretend() as machine:
        loop = stepping(folder, machine, made, steps=1, warm=1)
        return machine.started, loop


def test_a_fast_step_starts_no_more_kernels_than_a_raw_loop(tmp_path: Path) -> None:
    with pretend() as machine:
        made = job("model=timm", "model.arch=resnet10t", "data.image_size=32", "data.in_chans=3", "batch.effective=8",
                   "batch.micro=8", "data.samples=64", *QUIET, probe=False)  # fmt: skip
        loop = stepping(tmp_path, machine, made, steps=1, warm=1)
        ours = machine.started
        model: Any = copy.deepcopy(loop.state.model)
        own = {id(theirs): mine for theirs, mine in zip(loop.state.model.parameters(), model.parameters(), strict=True)}
        groups = [{**g, "params": [own[id(p)] for p in g["params"]]} for g in loop.state.optimizer.param_groups]
        optimizer = torch.optim.SGD(groups, lr=0.001)
        source = loop.feed.source
        for step in range(2):
            if step == 1:
                machine.forget()
            index = torch.arange(8).to("cuda", non_blocking=True)
            loss = torch.nn.functional.cross_entropy(model(source.inputs[index]), source.targets[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        raw = machine.started
    assert 0 < ours <= raw, (ours, raw)


def test_what_is_added_is_a_handful_of_kernels(tmp_path: Path) -> None:
    fast, _ = resnet(tmp_path / "fast")
    choices = "ema=ema", "reduction=exact", "reduction=exact reduction.method=bin64", "max_grad_norm=1"
    added = {words: resnet(tmp_path / str(i), *words.split())[0] - fast for i, words in enumerate(choices)}
    # an average: one lerp, two copies; bin64: five or six a bucket and shard, and the sums into gradients
    assert added["ema=ema"] <= 6 and added["max_grad_norm=1"] <= 10 and added["reduction=exact"] <= 16, added
    assert added["reduction=exact reduction.method=bin64"] <= 50, added


def test_the_order_of_an_epoch_is_sent_once(tmp_path: Path) -> None:
    """Not the indices of each micro step: of data that live on the device a batch is two gathers."""
    with pretend() as machine:
        stepping(tmp_path, machine, job(*QUIET, "batch.effective=28", "sampler.tail=drop", "data.samples=200"))
        assert machine.launches["copy between devices"] == 0 and machine.launches["index_select"] == 2 * 4 * 3
