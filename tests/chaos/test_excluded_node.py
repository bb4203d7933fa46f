"""A node whose bits are off leaves an elastic launch of two agents, and the training goes on without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chaos import Launch, assert_same_training, the_run, undisturbed

from isobatch.launch import meeting

LIMIT_S = 400
STEPS = ["steps=60", "batch.micro=8", "checkpoint.every=50"]
AUDIT = ["audit=replay", "audit.every=20", "audit.on_mismatch=exclude"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def node(cwd: Path, number: int, port: int, **environ: str) -> Launch:
    """torchrun on this machine as one of two nodes; the first serves the rendezvous."""
    options = ["--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv-id=audited", "--rdzv-backend=c10d",
               f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1",
               f"--rdzv-conf=is_host={str(number == 1).lower()},timeout=200,last_call_timeout=10"]  # fmt: skip
    return Launch(cwd, options, [*STEPS, *AUDIT], name=f"node{number}", **environ)


def test_the_training_goes_on_without_the_node_that_is_off(tmp_path: Path) -> None:
    reference = undisturbed(tmp_path, *STEPS)
    port = meeting.ports_of(str(tmp_path))[0]
    nodes = [node(tmp_path, 1, port), node(tmp_path, 2, port, CHAOS_FLIP="20")]
    try:
        codes = [each.wait(LIMIT_S) for each in nodes]
    finally:
        for each in nodes:
            each.end()
    run = the_run(tmp_path)
    assert run is not None
    log = (run / "train.log").read_text()
    assert codes[0] == 0 and codes[1] != 0, [each.tail() for each in nodes]
    assert "computed bits of shard" in log and "; step 19 is saved; host " in log and "leaves the launch" in log
    assert json.loads((run / "plan.json").read_text())["world_size"] == 1
    assert_same_training(run, reference)
