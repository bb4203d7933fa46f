"""Who works where: devices, backends, ranks from the environment, CUDA_VISIBLE_DEVICES (case 33)."""

from __future__ import annotations

import pytest

from isobatch.errors import ConfigError
from isobatch.launch import check_joined, devices
from isobatch.runtime.distributed import Ranks, choose_backend, device_name, ranks_from_environment


@pytest.mark.case(33)
def test_the_local_rank_decides_the_device() -> None:
    ranks = ranks_from_environment({"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert ranks == Ranks(5, 6, 1, 2)
    assert device_name(ranks.local_rank, ranks.local_world_size, accelerators=2) == "cuda:1"


@pytest.mark.case(33)
def test_device_numbers_are_logical(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert device_name(0, 2, accelerators=2) == "cuda:0"


@pytest.mark.case(33)
def test_more_processes_than_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.nproc=3: 3 processes on this machine share 2 visible"):
        device_name(0, 3, accelerators=2)


@pytest.mark.case(33)
def test_without_accelerator_it_is_cpu_and_gloo() -> None:
    assert device_name(2, 3, accelerators=0) == "cpu"
    assert choose_backend(None, "cpu") == "gloo"
    assert choose_backend(None, "cuda") == choose_backend("nccl", "cuda") == "cpu:gloo,cuda:nccl"
    assert choose_backend("gloo", "cuda") == "gloo"
    with pytest.raises(ConfigError, match="nccl needs CUDA"):
        choose_backend("nccl", "cpu")


def test_ranks_from_slurm_and_from_nothing() -> None:
    slurm = {"RANK": "5", "WORLD_SIZE": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}
    assert ranks_from_environment(slurm) == Ranks(5, 8, 1, 4)
    assert ranks_from_environment({}) == Ranks()
    for wrong in ({"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}):
        with pytest.raises(ConfigError, match="RANK="):
            ranks_from_environment(wrong)


def test_one_process_exchanges_with_itself() -> None:
    alone = Ranks()
    assert (alone.agree(7), alone.broadcast_object("x"), alone.gather_objects(1)) == (7, "x", [1])
    tensor = object()
    assert alone.all_reduce(tensor) is tensor  # type: ignore[arg-type,comparison-overlap]


def test_devices_are_picked_in_order_out_of_the_visible_ones() -> None:
    assert devices.visible_devices([0, 1, 3], None) == "0,1,3"
    assert devices.visible_devices([3, 0], "4,5,6,GPU-aa") == "GPU-aa,4"
    assert devices.visible_devices(None, "2,3") == "2,3"
    assert devices.visible_devices(None, None) is None
    with pytest.raises(ConfigError, match=r"parallel\.devices=\[0, 2\]: CUDA_VISIBLE_DEVICES=4,5 shows 2"):
        devices.visible_devices([0, 2], "4,5")


def test_devices_are_shown_for_one_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with devices.showing("1,0"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setattr(devices, "cuda_started", lambda: True)
    assert devices.can_show("1,0") and not devices.can_show("0,1")
    with pytest.raises(ConfigError, match="CUDA has started in this process with 1,0"), devices.showing("0,1"):
        pass


def test_settings_that_contradict_the_started_ranks_are_refused() -> None:
    check_joined({"nproc": None}, Ranks(0, 2, 0, 2))
    check_joined({"nproc": 2}, Ranks(0, 2, 0, 2))
    with pytest.raises(ConfigError, match=r"parallel\.nproc=3: was started as 2 rank"):
        check_joined({"nproc": 3}, Ranks(0, 2, 0, 2))


def test_a_group_that_could_not_be_made_does_not_shift_the_next_ones_name(tmp_path) -> None:
    """Ranks meet under a number that torch counts: one that failed once waited for its peers for ever."""
    import torch.distributed as dist

    from isobatch.runtime.distributed import create_group, destroy_group

    def count() -> int:
        return dist.distributed_c10d._world.group_count

    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(Exception, match=r"(?i)time|connect"):
        create_group(Ranks(0, 2, 0, 2), "gloo", store, 0.5)
    assert count() == 0
    create_group(Ranks(), "gloo", dist.FileStore(str(tmp_path / "other"), 1), 5)
    assert count() == 1
    destroy_group()
    assert count() == 0
