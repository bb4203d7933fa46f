"""Several machines: how busy each of them is goes into the rows of evaluations."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

from harness import BASE, on_ranks, train

from isobatch.runtime import machine_load
from isobatch.runtime.distributed import Ranks


def test_one_rank_of_a_machine_speaks_for_it(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       8000 kB\nMemFree:  1 kB\nMemAvailable:    2900 kB\n")
    found = machine_load.here(Ranks(2, 4, 0, 2), tmp_path / "meminfo")
    assert found is not None and found["memory_used_mb"] == 4 and found["load"] >= 0
    assert machine_load.here(Ranks(3, 4, 1, 2)) is None
    assert set(machine_load.here(Ranks(), tmp_path / "nothing") or {}) == {"load"}
    assert machine_load.rows([{"load": 1.0}, None, {"load": 3.0}, None]) == {"node0/load": 1.0, "node1/load": 3.0}
    assert machine_load.rows([{"load": 1.0}, None]) == {}


def test_two_machines_in_a_loggers_rows(tmp_path: Path) -> None:
    words = (*BASE, "parallel=ddp", "logger=csv", "epochs=null", "steps=1", "batch.effective=8")

    def work(ranks: Ranks) -> None:
        train(tmp_path, *words, ranks=dataclasses.replace(ranks, local_rank=0, local_world_size=1))

    on_ranks(2, tmp_path, work)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        (row,) = [row for row in csv.DictReader(file) if row["eval/loss"]]
    assert float(row["node0/load"]) >= 0 and float(row["node1/load"]) >= 0
