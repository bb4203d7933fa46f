"""Machines that are lost and machines that join: a network namespace each, on one bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import Launch, assert_same_training, rows, the_run, undisturbed, until

LIMIT_S = 240
STEPS = ["steps=500", "batch.micro=4", "batch.shard=null"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, timeout=20).returncode == 0


class Network:
    """`count` namespaces 10.77.0.1, 10.77.0.2, ..., joined by a bridge that sits in a namespace of its own."""

    def __init__(self, cwd: Path, count: int):
        self.cwd, self.names = cwd, [f"iso{os.getpid()}n{number}" for number in range(count + 1)]
        self.made = all(ip("netns", "add", name) for name in self.names)
        hub = self.names[0]
        self.made = self.made and ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        self.made = self.made and ip("-n", hub, "link", "set", "bridge", "up")
        for number, name in enumerate(self.names[1:], 1):
            self.made = self.made and all((
                ip("link", "add", "eth7", "netns", name, "type", "veth", "peer", "name", f"port{number}", "netns", hub),
                ip("-n", hub, "link", "set", f"port{number}", "master", "bridge", "up"),
                ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth7"),
                ip("-n", name, "link", "set", "lo", "up"),
                ip("-n", name, "link", "set", "eth7", "up"),
            ))  # fmt: skip

    def remove(self) -> None:
        for name in self.names:
            ip("netns", "del", name)

    def node(self, number: int, nnodes: str, host: int = 1) -> Launch:
        """torchrun on node `number`; node `host` serves the rendezvous."""
        # local-addr and is_host: the machines share a host name here, which is what torchrun goes by
        options = [f"--nnodes={nnodes}", "--nproc_per_node=1", "--max-restarts=5", "--rdzv-id=elastic", "--rdzv-backend=c10d",
                   f"--rdzv-endpoint=10.77.0.{host}:29400", f"--local-addr=10.77.0.{number}",
                   f"--rdzv-conf=is_host={str(number == host).lower()},timeout=200,last_call_timeout=5"]  # fmt: skip
        return Launch(self.cwd, options, STEPS, name=f"node{number}", prefix=("ip", "netns", "exec", self.names[number]),
                      step_s=0.15, GLOO_SOCKET_IFNAME="eth7", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # fmt: skip


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    made = Network(tmp_path, 3)
    try:
        if not made.made:
            pytest.skip("network namespaces are not allowed here")
        yield made
    finally:
        made.remove()


def test_a_node_is_lost_and_the_other_goes_on(tmp_path: Path, network: Network) -> None:
    reference = undisturbed(tmp_path, *STEPS)
    nodes = [network.node(1, "1:2"), network.node(2, "1:2")]
    try:
        until(nodes[0].training, LIMIT_S, nodes[0])
        assert world(tmp_path) == 2
        until(lambda: len(rows(the_run(tmp_path))) > 12, LIMIT_S, nodes[0])
        nodes[1].kill_all()
        began = time.monotonic()
        until(lambda: world(tmp_path) == 1 and nodes[0].training(), LIMIT_S, nodes[0])
        print(f"a node lost: {time.monotonic() - began:.1f} s to the next step")
        assert nodes[0].wait(LIMIT_S) == 0, nodes[0].tail()
    finally:
        for node in nodes:
            node.end()
    assert_same_training(the_run(tmp_path), reference)


@pytest.mark.parametrize("host", [1, 3], ids=["later ranks", "becomes rank 0"])
def test_nodes_join_later_and_one_leaves_again(tmp_path: Path, network: Network, host: int) -> None:
    """torchrun ranks nodes by address: with node 3 as the first one, those that join come before it."""
    reference = undisturbed(tmp_path, *STEPS)
    order = [host, 2, 4 - host]
    nodes = [network.node(host, "1:3", host)]
    try:
        for count in (2, 3):
            until(nodes[0].training, LIMIT_S, nodes[0])
            until(lambda: len(rows(the_run(tmp_path))) > 6, LIMIT_S, nodes[0])
            nodes.append(network.node(order[count - 1], "1:3", host))
            began = time.monotonic()
            until(lambda n=count: world(tmp_path) == n and nodes[0].training(), LIMIT_S, nodes[0])
            print(f"node {count} of 3 joined: {time.monotonic() - began:.1f} s from its start to the next step")
        nodes[2].kill_all()
        until(lambda: world(tmp_path) == 2 and nodes[0].training(), LIMIT_S, nodes[0])
        assert nodes[0].wait(LIMIT_S) == 0, nodes[0].tail()
    finally:
        for node in nodes:
            node.end()
    assert_same_training(the_run(tmp_path), reference)


def world(cwd: Path) -> int:
    """How many ranks the latest attempt has, as its plan says."""
    import json

    run = the_run(cwd)
    plan = run / "plan.json" if run else None
    return int(json.loads(plan.read_text())["world_size"]) if plan and plan.exists() else 0
