"""Cases 27 to 30: one W&B run per job and none per rank, no network, no key, a sweep agent's arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import warm
import yaml
from harness import train
from wandb_standin import KEY, StandIn, bare_environ, offline_files, read_offline

from isobatch.config import conf_folder
from isobatch.errors import JobFailed

TRAIN = str(conf_folder().parent / "train.py")
TINY = ("model=mlp", "model.width=8", "model.depth=1", "threads=1", "log_every=1", "epochs=null",
        "logger.system_metrics=false")  # fmt: skip


def command(*words: str, environ: dict[str, str], launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, *launcher, TRAIN, *words], env=environ, capture_output=True, stdin=subprocess.DEVNULL)


def everything_written(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("by", ["itself", pytest.param("torchrun", marks=pytest.mark.slow)])
@pytest.mark.case(27)
def test_27_one_run_for_all_ranks(tmp_path: Path, by: str) -> None:
    environ = {**bare_environ(tmp_path), "WANDB_MODE": "offline"}
    words = (*TINY, "parallel=ddp", "steps=4")
    if by == "torchrun":
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
        done = command(*words, launcher=torchrun, environ=environ)
    else:
        done = command(*words, "parallel.nproc=2", environ=environ)
    assert done.returncode == 0, done.stderr
    (file,) = offline_files(tmp_path)
    run = read_offline(file)
    rows = [json.loads(line) for line in next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()]
    assert run.values("train/loss") == pytest.approx([row["train/loss"] for row in rows if "train/loss" in row])
    assert len(run.values("train/loss")) == 4 and run.exit == 0
    assert run.config["plan/world_size"] == 2 and {f"memory/rank{rank}_mb" for rank in range(2)} <= set(run.summary)
    assert done.stdout.count("plan\n") == 1 and done.stdout.count("wandb sync") == 1


@pytest.mark.slow
@pytest.mark.case(28)
def test_28_one_run_per_job_of_a_sweep(tmp_path: Path) -> None:
    environ = {**bare_environ(tmp_path), "WANDB_MODE": "offline"}
    done = command("-m", *TINY, "accumulation=1,0,3", "optimizer.lr=0.1", "steps=2", environ=environ)
    assert done.returncode == 1
    (sweep,) = tmp_path.glob("multirun/*/*")
    assert "accumulation" in (sweep / "1" / "train.log").read_text()
    assert not offline_files(sweep / "1")  # refused before a run was opened
    runs = [read_offline(file) for job in ("0", "2") for file in offline_files(sweep / job)]
    assert [run.config["accumulation"]["steps"] for run in runs] == [1, 3]
    assert [run.config["plan/accumulation_steps"] for run in runs] == [1, 3]
    assert [run.meta["display_name"] for run in runs] == ["accumulation=1", "accumulation=3"]
    assert len({run.meta["run_id"] for run in runs}) == 2 and {run.exit for run in runs} == {0}
    assert {run.meta["run_group"] for run in runs} == {f"{sweep.parent.name}_{sweep.name}"}
    # case 30 (iii): nested entries, numbers as numbers, nothing unresolved
    assert runs[1].config["optimizer"]["lr"] == 0.1 and runs[1].config["batch"]["effective"] == 48
    assert "${" not in json.dumps(runs[1].config) and "???" not in json.dumps(runs[1].config)


@pytest.mark.case(28)
def test_28_failed_run_is_closed_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_wandb: None) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(JobFailed, match="train/loss is"):
        train(tmp_path / "run", *TINY[3:], "logger=wandb", "steps=50", "optimizer=sgd", "optimizer.lr=1e6",
              "model=linear", "data=random_matrix", "loss=mse")  # fmt: skip
    (file,) = offline_files(tmp_path)
    run = read_offline(file)
    assert run.exit == 1 and run.summary["state"] == "failed" and run.summary["error"].startswith("train/loss is")


@pytest.mark.slow
@pytest.mark.case(29)
def test_29_without_the_package(tmp_path: Path) -> None:
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "wandb.py").write_text("raise ImportError('blocked')\n")
    environ = {**bare_environ(tmp_path), "PYTHONPATH": str(tmp_path / "blocked")}
    words = [word for word in TINY if not word.startswith("logger.")]
    done = command(*words, "steps=1", "logger=none", environ=environ)  # with logger=wandb: logger/test_logger.py
    assert done.returncode == 0 and "evaluation at step 1" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.case(29)
def test_29_offline_waits_for_no_server(tmp_path: Path) -> None:
    """A proxy that answers nothing stands for a network that is not there."""
    took = {}
    for mode in ("disabled", "offline"):
        environ = {
            **bare_environ(tmp_path / mode),
            "HTTPS_PROXY": "http://10.255.255.1:9",
            "HTTP_PROXY": "http://10.255.255.1:9",
        }
        (tmp_path / mode).mkdir(exist_ok=True)
        began = time.monotonic()
        done = command(*TINY, "steps=2", f"logger.mode={mode}", f"hydra.run.dir={tmp_path / mode / 'run'}", environ=environ)
        took[mode] = time.monotonic() - began
        assert done.returncode == 0, done.stderr
    assert took["offline"] <= took["disabled"] + 15
    assert len(offline_files(tmp_path / "offline")) == 1 and not list((tmp_path / "disabled").rglob("*.wandb"))


@pytest.mark.case(29)
def test_29_online_without_a_key_is_refused_at_once(tmp_path: Path) -> None:
    done = command(*TINY, "steps=1", "logger.mode=online", environ=bare_environ(tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("isobatch: logger.mode=online: ") and "WANDB_API_KEY" in line and "logger.mode=offline" in line
    assert not list(tmp_path.rglob("plan.json"))  # written when data and model are there


@pytest.mark.case(29)
def test_29_disabled_leaves_no_folder(tmp_path: Path) -> None:
    train(tmp_path / "run", *TINY, "logger=wandb", "logger.mode=disabled", "steps=1")
    assert (tmp_path / "run" / "summary.json").exists() and not list(tmp_path.rglob("*wandb*"))


@pytest.mark.case(30)
def test_30_dashes_are_refused(tmp_path: Path) -> None:
    done = command("--optimizer.lr=0.1", environ=bare_environ(tmp_path))
    assert done.returncode == 2 and "write optimizer.lr=0.1" in done.stderr


@pytest.mark.slow
@pytest.mark.case(30)
def test_30_agent_runs_our_sweep_file(tmp_path: Path) -> None:
    """`wandb agent` end to end, with two self-launched ranks in each job, against a server on loopback."""
    sweep = yaml.safe_load((conf_folder() / "wandb_sweep.yaml").read_text())
    sweep["command"] += [*TINY, "parallel=ddp", "parallel.nproc=2", "steps=2"]
    sweep["program"] = TRAIN
    with StandIn() as server:
        server.sweep_yaml = yaml.safe_dump(sweep)
        args = {"accumulation": {"value": 3}, "optimizer.lr": {"value": 0.01}, "precision": {"value": "fp32"}}
        assert set(args) == set(sweep["parameters"])
        server.jobs = [{"type": "run", "run_id": "job1", "program": TRAIN, "args": args}]
        environ = {**server.environ(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run([sys.executable, "-m", "wandb", "agent", "tester/isobatch/sw1"], env=environ, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=200)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(server.runs) == ["job1"], done.stderr + done.stdout
    run: Any = server.runs["job1"]
    assert run.exit == 0 and len(run.values("train/loss")) == 2
    assert run.config["plan/accumulation_steps"] == 3 and run.config["plan/world_size"] == 2
    assert run.config["optimizer"]["lr"] == 0.01
    assert KEY not in everything_written(tmp_path) + done.stdout + done.stderr
