"""`audit=replay`: injected faults are found and named, and a sound training neither stops nor changes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Fault, train_with
from harness import on_ranks, plain, summary, train
from plans import BASE, Plan, differences, job, traces
from torch import Tensor, nn

from isobatch import config as configuration
from isobatch import model as models
from isobatch.audit import ReplayAudit, replay
from isobatch.audit.shard import Round
from isobatch.batch_plan import BatchPlan, resolve_batch
from isobatch.data import DataInfo
from isobatch.errors import ConfigError, JobFailed
from isobatch.launch import withdrawal
from isobatch.runtime.distributed import Ranks

SHORT = (*BASE, "steps=4", "eval_every=4", "reduction=exact", "audit=replay", "audit.every=2", "optimizer=adamw")
COMPUTED = ("gradient", "activation", "shard statistic", "second computation")
HELD = ("weight", "optimizer", "statistic", "average")
FIRST = {
    "gradient": "in the gradient of block.0.weight (Conv2d)",
    "activation": "first in its statistics",  # the batch norm after it sees each value, a ReLU need not pass it on
    "shard statistic": "in its statistics",
    "second computation": "in the gradient of block.0.weight (Conv2d)",
    "weight": "model.stem.0.bias", "optimizer": "optimizer.stem.0.weight.exp_avg", "statistic": "model.stem.1.running_var",
    "average": "ema.stem.0.weight",
}  # fmt: skip


def on_plan(made: dict[str, Any], world_size: int) -> dict[str, Any]:
    return {**made, "parallel": plain("parallel=ddp" if world_size > 1 else "parallel=single")["parallel"]}


def endings(folder: Path, world_size: int, kinds: tuple[str, ...], *words: str) -> dict[str, list[str]]:
    """Kind of fault (or `none`) -> why the training ended, of each rank; the last rank has the fault."""
    made = on_plan(job(*SHORT, *words), world_size)

    def work(ranks: Ranks) -> dict[str, str]:
        found = {}
        for kind in kinds:
            again = kind == "second computation"
            fault = Fault("gradient" if again else kind, world_size - 1, 3 if kind in HELD else 4, again)
            found[kind] = train_with(None if kind == "none" else fault, made, folder / kind.replace(" ", "_"), ranks)
        return found

    results = [work(Ranks())] if world_size == 1 else on_ranks(world_size, folder / "ranks", work)
    return {kind: [result[kind] for result in results] for kind in kinds}


def named(found: dict[str, list[str]], world_size: int, tie: tuple[str, ...] = ()) -> None:
    assert not any(found.pop("none", [])), "a false alarm"
    for kind, lines in found.items():
        assert len(set(lines)) == 1, f"{kind}: ranks end with other lines"
        line, who = lines[0], f"rank {world_size - 1} (host "
        assert line.startswith("audit: ") and "\n" not in line and " step 4" in line, line
        assert FIRST[kind] in line, (kind, line)
        assert who in line and ("rank 0 (" not in line or kind in tie or world_size == 1), (kind, line)


def test_one_process_finds_what_passes_by_repetition(tmp_path: Path) -> None:
    named(endings(tmp_path, 1, ("gradient",)), 1)
    found = summary(tmp_path / "gradient")
    assert found["state"] == "failed" and found["steps"] == 3 and found["error"].startswith("audit: rank 0 (host ")


def test_faults_of_one_rank_of_three_are_named(tmp_path: Path) -> None:
    named(endings(tmp_path, 3, ("activation", "weight")), 3)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("words", [(), ("precision=O2", "precision.dtype=bfloat16"), ("reduction.method=bin64",)])
@pytest.mark.parametrize("some", [COMPUTED, (*HELD, "none")], ids=["computed", "held"])
def test_every_fault_of_one_rank_is_named(tmp_path: Path, world_size: int, some: tuple[str, ...],
                                              words: tuple[str, ...]) -> None:  # fmt: skip
    kinds = tuple(kind for kind in some if "precision=O2" not in words or kind != "gradient")
    named(endings(tmp_path, world_size, kinds, *words), world_size, HELD if world_size == 2 else ())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gradient", "activation", "shard statistic"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_device_that_is_off_now_and_then_is_named_at_the_first_time(tmp_path: Path, world_size: int, kind: str) -> None:
    made = on_plan(job(*SHORT, "audit.every=1", "steps=200", "eval_every=200", "log_every=200"), world_size)
    first, second = 20 + 7 * world_size, 170

    def work(ranks: Ranks) -> str:
        return train_with(Fault(kind, 1, first, also=(second,)), made, tmp_path / "run", ranks)

    for line in on_ranks(world_size, tmp_path / "ranks", work):
        assert line.startswith("audit: rank 1 (host ") and f" of step {first} " in line and "rank 0 (" not in line, line


# -- no trace -----------------------------------------------------------------------------------------------------------
AUDITED = ("reduction=exact", "audit=replay", "audit.every=1", "steps=3", "eval_every=3")
WORDS = {
    "bin64 fp16": ("reduction.method=bin64", "precision=amp", "precision.dtype=float16", "precision.loss_scale=2097152"),
    "half weights": ("precision=O2", "precision.dtype=bfloat16", "optimizer=adamw", "max_grad_norm=0.5"),
    "views": ("loss=jsd", "batch.micro=11", "batch.shard=null"),
    "taught": ("loss=distill", "loss.teacher.arch=test_resnet"),
    "mixed": ("augment=mixup",),
    "sharpness": ("optimizer.sam=0.05", "reduction.method=bin64"),
    "by elements": ("loss.ignore_index=3",),
    "pure half": ("precision=bf16_pure",),
}  # fmt: skip


@cache
def of(name: str) -> dict[str, Any]:
    """Composed where it is first asked for: every worker of the tests imports this file."""
    return job(*BASE, *AUDITED, *WORDS[name])


def unaudited(jobs: dict[str, Any]) -> dict[str, Any]:
    return {name: {**made, "audit": plain()["audit"]} for name, made in jobs.items()}


def same(folder: Path, plan: Plan, jobs: dict[str, Any]) -> None:
    """A training is the same to the bit with an audit of every step and without."""
    asked, unasked = traces(folder / "audited", plan, jobs), traces(folder / "not", plan, unaudited(jobs))
    for name in jobs:
        for rank, (one, other) in enumerate(zip(unasked[name], asked[name], strict=True)):
            assert not differences(one, [other]) and one.statistics == other.statistics, (name, rank)


def test_a_training_is_the_same_with_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards: list[int] = []
    original = replay.Audit._compute
    monkeypatch.setattr(replay.Audit, "_compute", lambda self, window, shard: shards.append(shard)
                        or original(self, window, shard))  # fmt: skip
    same(tmp_path, Plan("one"), {name: of(name) for name in ("by elements", "sharpness")})
    assert shards == [0, 1, 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("plan", [
    Plan("one"), Plan("dp2", ("parallel=dp", "parallel.replicas=2")),
    *(Plan(f"ddp{n}", ("parallel=ddp",), n) for n in (2, 3, 7)),
], ids=lambda plan: plan.name)  # fmt: skip
def test_so_is_every_kind_on_every_plan(tmp_path: Path, plan: Plan) -> None:
    jobs = {name: of(name) for name in WORDS}
    if plan.num_ranks == 1:  # ranks of a test have no children
        jobs["workers"] = job(*BASE, *AUDITED, "augment=mixup", "data.num_workers=2")
    same(tmp_path, plan, jobs)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_false_alarm_in_200_steps(tmp_path: Path, seed: int) -> None:
    made = on_plan(job(*BASE, *AUDITED, "steps=200", "eval_every=100", "log_every=100", "optimizer=adamw"), 2)

    def work(ranks: Ranks) -> str:
        return train_with(None, {**made, "seed": seed}, tmp_path / "run", ranks)

    assert on_ranks(2, tmp_path / "ranks", work) == ["", ""]


@pytest.mark.slow
def test_a_resumed_run_is_audited_at_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    original = replay.Audit._compute
    monkeypatch.setattr(replay.Audit, "_compute", lambda self, window, shard: steps.append(window.step + 1)
                        or original(self, window, shard))  # fmt: skip
    words = (*SHORT, "checkpoint=default", "scheduler=constant")
    train(tmp_path / "one", *words, "steps=3")
    train(tmp_path / "two", *words, "steps=6", f"resume={tmp_path / 'one'}")
    assert steps == [2, 4, 6]


# -- what it does with a mismatch ------------------------------------------------------------------------------------------
def test_a_warning_lets_the_run_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = on_plan(job(*SHORT, "audit.on_mismatch=warn"), 1)
    assert train_with(Fault("gradient", 0, 4), made, tmp_path / "run", Ranks()) == ""
    assert "audit: rank 0 (host " in caplog.text and summary(tmp_path / "run")["state"] == "completed"


def test_before_a_checkpoint_states_are_compared(tmp_path: Path) -> None:
    made = on_plan(job(*SHORT, "audit.every=50"), 2)
    made["checkpoint"] = plain("checkpoint.every=2", "checkpoint.best=null")["checkpoint"]

    def work(ranks: Ranks) -> tuple[str, list[str]]:
        line = train_with(Fault("weight", 1, 3), made, tmp_path / "run", ranks)
        return line, sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("*"))

    for line, saved in on_ranks(2, tmp_path / "ranks", work):
        assert "before step 5, rank 0 (" in line and "model.stem.0.bias is the first tensor that differs" in line, line
        assert saved == ["last", "step-2"], "what differs was saved"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tree", "bin64"])
def test_exclusion_saves_the_step_before_and_says_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                     method: str) -> None:  # fmt: skip
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    made = on_plan(job(*SHORT, "audit.on_mismatch=exclude", f"reduction.method={method}"), 1)
    made["checkpoint"] = plain("checkpoint.best=null")["checkpoint"]
    line = train_with(Fault("gradient", 0, 4), made, tmp_path / "run", Ranks())
    assert "; step 3 is saved; host " in line and "torchrun did not start the run" in line
    clean = on_plan(unaudited({"it": {**made, "steps": 4, "resume": str(tmp_path / "run")}})["it"], 1)
    whole = on_plan(unaudited({"it": made})["it"], 1)
    ends = [summary(tmp_path / name)["weights_sha256"] for name in ("on", "whole")
            if train_with(None, clean if name == "on" else whole, tmp_path / name, Ranks()) == ""]  # fmt: skip
    assert len(ends) == 2 and ends[0] == ends[1]


@pytest.mark.parametrize(("environ", "told", "leaves"), [
    ({}, "torchrun did not start the run", False),
    ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "the launch has no other", False),
    ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "leaves the launch", True),
    ({"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "PET_RDZV_ENDPOINT": "here"},
     "serves the rendezvous, and the launch ends with it: start it again elsewhere", True),
])  # fmt: skip
def test_a_node_leaves_where_there_is_another(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], told: str,
                                              leaves: bool) -> None:  # fmt: skip
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(withdrawal, "serves", lambda pid, port: (pid, port) == (os.getppid(), 29400))
    node = withdrawal.LaunchNode(environ)
    assert told in node.withdraw()
    assert sent == ([(os.getppid(), signal.SIGTERM)] if leaves else [])
    assert (node.hindrance() == "") == (told == "leaves the launch")


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="the kernel keeps no table of sockets there")
def test_who_serves_the_rendezvous_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert withdrawal.serves(os.getpid(), port)
        assert not withdrawal.serves(os.getppid(), port)
        with socket.create_connection(("127.0.0.1", port)) as other:
            assert not withdrawal.serves(os.getpid(), other.getsockname()[1]), "connected to is not listened at"
    assert not withdrawal.serves(os.getpid(), port)
    for words, seen in ((["--rdzv-endpoint=node0:1234"], 1234), (["--rdzv_endpoint", "[::1]:77"], 77), (["--x"], 0)):
        agent = subprocess.Popen([sys.executable, "-S", "-c", "print(flush=True); input()", *words], stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE)  # fmt: skip
        try:
            assert agent.stdout is not None and agent.stdout.readline(), "it runs: the kernel has its command line by now"
            assert withdrawal.rendezvous_port(agent.pid, {}) == seen
        finally:
            agent.kill()
            agent.communicate()
    assert withdrawal.rendezvous_port(0, {"PET_RDZV_ENDPOINT": "node0"}) == 29400


def test_what_cannot_be_excluded_is_said_before_training(tmp_path: Path, caplog: pytest.LogCaptureFixture,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    train(tmp_path / "run", made=on_plan(job(*SHORT, "steps=1", "eval_every=1", "audit.on_mismatch=exclude"), 1))
    assert "audit.on_mismatch=exclude: host " in caplog.text and "did not start the run: if its bits are off" in caplog.text


# -- refusals -----------------------------------------------------------------------------------------------------------
def test_sums_that_nobody_can_look_into_are_refused() -> None:
    assert "no shard is looked at" in str(ReplayAudit(every=5).note(4)) and ReplayAudit(every=4).note(4) is None
    with pytest.raises(ConfigError, match=r"audit.name=replay: compares shards by their bits.*set reduction=exact"):
        configuration.load(plain(*BASE, "steps=1", "audit=replay"))
    for word in ("audit.every=0", "audit.on_mismatch=ignore"):
        with pytest.raises(ConfigError, match=word.split("=")[0]):
            configuration.load(plain(*BASE, "steps=1", "reduction=exact", "audit=replay", word))


class Counts(nn.Module):
    def __init__(self, info: DataInfo, counting: bool = True):
        super().__init__()
        self.layer = nn.Linear(info.features, info.num_classes)
        self.register_buffer("constant", torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))
        self.counting = counting

    def forward(self, images: Tensor) -> Tensor:
        if self.counting:
            self.seen += 1
        return self.layer(images.flatten(1))


@dataclass(frozen=True)
class CountsProbe:
    name: str = "audit_counts"
    batch_norm: str = "shard"
    counting: bool = True

    def build(self, info: DataInfo) -> nn.Module:
        return Counts(info, self.counting)


models.TABLE[CountsProbe.name] = CountsProbe


def test_a_model_whose_ranks_keep_something_of_their_own_is_refused_before_the_first_update(tmp_path: Path) -> None:
    made = {**on_plan(job(*SHORT, "steps=2"), 1), "model": {"name": CountsProbe.name}}
    with pytest.raises(JobFailed, match=r"audit=replay cannot hold: .*no rule for \(seen\), so"):
        train(tmp_path / "run", made=made)
    assert summary(tmp_path / "run")["updates"] == 0


def test_buffers_that_a_resume_has_written_are_no_such_thing(tmp_path: Path) -> None:
    made = {**on_plan(job(*SHORT, "steps=1"), 1), "model": {"name": CountsProbe.name, "counting": False}}
    made["checkpoint"] = plain("checkpoint.best=null")["checkpoint"]
    train(tmp_path / "one", made=made)
    train(tmp_path / "two", made={**made, "steps": 2, "resume": str(tmp_path / "one")})
    assert summary(tmp_path / "two")["updates"] == 2


# -- who looks at whom ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_rank_meets_every_shard_of_every_other(world_size: int) -> None:
    plan = BatchPlan(resolve_batch(44, 8, None, world_size), 150)
    shards = [range(v, v + 1) if v < 6 else range(0) for v in range(world_size)] if world_size > 5 else [
        range(6 * r // world_size, 6 * (r + 1) // world_size) for r in range(world_size)]  # fmt: skip
    met = set()
    for number in range(100):
        due = Round(number, plan.window(0), shards)
        pairs = {(due.owner_of(r), r) for r in range(world_size)}
        assert len({owner for owner, _ in pairs}) == world_size, "each is looked at by one"
        assert all(owner != auditor or world_size == 1 for owner, auditor in pairs)
        assert all(due.auditor_of(owner) == auditor for owner, auditor in pairs)
        met |= {(due.shard_of(owner), auditor) for owner, auditor in pairs}
    expected = {(v, a) for o in range(world_size) for v in shards[o] for a in range(world_size) if a != o or world_size == 1}
    assert {pair for pair in met if pair[0] is not None} == expected


def test_empty_shards_of_a_small_tail_are_nobody_s(tmp_path: Path) -> None:
    plan = BatchPlan(resolve_batch(44, 8, None, 3), 46)
    due = Round(0, plan.window(1), [plan.batch.shards_of(owner, plan.window(1).num_filled) for owner in range(3)])
    assert [due.shard_of(owner) for owner in range(3)] == [0, 1, None]
