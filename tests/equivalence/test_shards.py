"""The shard is stated, the micro batch is free: one training at any number of shards a forward, on any plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import ONE, traces
from several import MAKERS, MICRO, PLANS, distances, job, losses_of


def test_a_micro_batch_of_any_size_is_the_same_training(tmp_path: Path) -> None:
    """In one process; the tail of 29 samples has shards of 5 and 4."""
    expected = {name: traces(tmp_path / "one", ONE, {name: job(name, 8)})[name][0] for name in ("own", "resnet")}
    assert len(set(losses_of(expected["own"]))) == 6
    jobs = {f"own {micro}": job("own", micro) for micro in MICRO[1:]} | {"resnet 24": job("resnet", 24)}
    found = distances(tmp_path / "more", ONE, jobs, expected)
    assert max(found.values()) <= 1e-12, found


@pytest.mark.parametrize(
    "plan",
    [
        "ddp2",
        *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("dp2", "fsdp2")),
    ],
)
def test_a_micro_batch_of_any_size_on_any_plan(tmp_path: Path, plan: str) -> None:
    expected = {"own": traces(tmp_path / "one", ONE, {"own": job("own", 8)})["own"][0]}
    found = distances(tmp_path / "more", PLANS[plan], {f"own {micro}": job("own", micro) for micro in (8, 24)}, expected)
    assert max(found.values()) <= 1e-12, found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("of", [*MAKERS])
@pytest.mark.parametrize("wide", [True, False], ids=["float64", "float32"])
def test_every_model_on_every_plan(tmp_path: Path, of: str, wide: bool) -> None:
    words, tolerance = ["optimizer.lr=0.001"], 1e-12 if wide else 1e-5
    if of in ("resnet", "efficientnet"):  # a channel of 1 x 1 has no variance to speak of, and its norm makes noise large
        words += ["data.image_size=48"]
    expected = {of: traces(tmp_path / "one", ONE, {of: job(of, 8, *words, wide=wide, steps=50)})[of][0]}
    jobs = {f"{of} {micro}": job(of, micro, *words, wide=wide, steps=50) for micro in MICRO}
    for name, plan in PLANS.items():
        found = distances(tmp_path / "more", plan, jobs, expected)
        print(f"{of}, {name}: {found}")
        assert max(found.values()) <= tolerance, (name, found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tails_of_every_size(tmp_path: Path) -> None:
    """But those that would give batch norm a shard of one sample, which is refused."""
    for tail in range(12, 48):
        expected = {"own": traces(tmp_path / "one" / str(tail), ONE, {"own": job("own", 8, tail=tail, steps=4)})["own"][0]}
        jobs = {f"own {micro}": job("own", micro, tail=tail, steps=4) for micro in (16, 24, 48)}
        found = distances(tmp_path / "more" / str(tail), ONE, jobs, expected)
        assert max(found.values()) <= 1e-12, (tail, found)
