"""Several jobs of a sweep at once, on a (pretended) cluster, listed without running, and asked for by Optuna."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest
from harness import BASE, train
from hydra import compose, initialize_config_dir
from launching import run, summary
from omegaconf import OmegaConf

from isobatch import hydra_patches
from isobatch.config import conf_folder
from isobatch.errors import ConfigError
from isobatch.sweeps import launchers, slots
from isobatch.sweeps.submitit_launcher import Running, end

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install 'isobatch[slurm]'")

QUICK = [*BASE, "data=synthetic", "data.samples=200", "data.image_size=8", "epochs=null"]
TRAIN = [sys.executable, str(launching.ROOT / "train.py"), "-m", *QUICK, "hydra.sweep.dir=sweep"]
NO_REPORT = "hydra.callbacks.report.enabled=false"  # it is not what most tests are about, and costs as much as a job


def lines(ended: launching.Ended, start: str) -> list[str]:
    return [line for line in ended.own_lines() if line.startswith(f"isobatch: {start}")]


def test_jobs_at_once_are_the_jobs_alone_and_a_failed_one_stops_no_other(tmp_path: Path) -> None:
    """Also with ranks of their own inside; then the same command only lists."""
    words = ["steps=3", "reduction=exact", "batch.micro=16"]
    ended = run([*TRAIN, *words, "plan=ddp2", "batch.effective=48,0", "sweep.parallel_jobs=2"], tmp_path)
    assert ended.code == 1, ended.err
    jobs = [summary(tmp_path / "sweep" / str(n)) for n in range(2)]
    assert [job["state"] for job in jobs] == ["completed", "failed"]
    assert jobs[0]["plan"]["world_size"] == 2
    train(tmp_path / "alone", *QUICK, *words)
    alone = summary(tmp_path / "alone")["weights_sha256"]
    assert jobs[0]["weights_sha256"] == alone
    assert len(lines(ended, "batch.effective=0: ")) == 1  # as a sweep in one process says it
    assert len(lines(ended, "job 0 ended with 0.")) == 1
    starts = [line for line in ended.own_lines() if " starts on core(s) " in line]
    assert len(starts) == 2
    if len(os.sched_getaffinity(0)) > 1:
        assert len({line.split(" starts on ")[1].split(":")[0] for line in starts}) == 2
    assert "batch.effective" in (tmp_path / "sweep" / "report.csv").read_text()

    before = sorted(tmp_path.rglob("*"))
    listed = run([*TRAIN, *words, "plan=ddp2", "batch.effective=48,0", "sweep.dry_run=true"], tmp_path)
    assert listed.code == 2  # job 1 would be refused
    assert sorted(tmp_path.rglob("*")) == before
    rows = [line.split() for line in listed.out.splitlines() if line.split()[:1] in (["0"], ["1"])]
    assert [row[1:5] for row in rows] == [["48", "16", "2", "2"], ["-"] * 4]
    assert "complete" in rows[0] and "refused" in rows[1] and "s" in rows[0]  # a measured rate was at hand
    assert "2 job(s), 0 to run: 0 samples in 0 updates" in listed.out


def test_a_dry_run_lists_plans_without_torch_and_leaves_nothing(tmp_path: Path) -> None:
    code = ("import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
            "from isobatch.cli import main; main()")  # fmt: skip
    words = ["data=synthetic", "data.samples=1000", "sampler.tail=drop", "epochs=2", "parallel=ddp", "parallel.nproc=4"]
    listed = run([sys.executable, "-c", code, "-m", *BASE, *words, "batch.effective=96,64", "batch.micro=8,auto",
                  "sweep.dry_run=true"], tmp_path)  # fmt: skip
    assert listed.code == 0, listed.err
    table = [line.split()[:7] for line in listed.out.splitlines() if line.strip()[:1].isdigit()][:4]
    assert table == [
        ["0", "96", "8", "4", "3", "20", "1,920"],
        ["1", "96", "?", "4", "?", "20", "1,920"],
        ["2", "64", "8", "4", "2", "30", "1,920"],
        ["3", "64", "?", "4", "?", "30", "1,920"],
    ]
    assert "4 job(s), 4 to run: 7,680 samples in 100 updates" in listed.out
    assert listed.out.splitlines()[-1] == "False"
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_one_run_is_refused(tmp_path: Path) -> None:
    ended = run([sys.executable, str(launching.ROOT / "train.py"), *BASE, "sweep.dry_run=true"], tmp_path)
    assert ended.code == 2
    assert lines(ended, "sweep.dry_run=True: there is no sweep to list; add -m")


def tasks(cwd: Path) -> set[int]:
    """Process ids of the jobs that submitit started for a sweep in `cwd`."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if "submitit.core._submit" in (entry / "cmdline").read_text() and Path(os.readlink(entry / "cwd")) == cwd:
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def wait_until(condition: object, started: launching.Started, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert started.process.poll() is None, started.process.communicate()
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_a_warned_job_queues_again_and_goes_on_and_ctrl_c_ends_all(tmp_path: Path) -> None:
    started = launching.Started(
        [*TRAIN, "steps=10000000", "log_every=1", "seed=0,1,2", NO_REPORT, "sweep.parallel_jobs=2"], tmp_path
    )
    rows = [tmp_path / "sweep" / job / "metrics.jsonl" for job in "01"]
    started.wait_for(*rows)
    first = next(iter(tasks(tmp_path)))
    os.kill(first, signal.SIGUSR2)  # what a queue sends before time is up
    wait_until(lambda: first not in tasks(tmp_path) and len(tasks(tmp_path)) == 2, started)
    (again,) = [job for job in "01" if (tmp_path / "sweep" / job / "summary.json").exists()]
    stopped_at = summary(tmp_path / "sweep" / again)["steps"]
    assert stopped_at > 0
    path = tmp_path / "sweep" / again / "metrics.jsonl"
    wait_until(lambda: json.loads(path.read_text().splitlines()[-2])["step"] > stopped_at, started)
    started.press_ctrl_c()
    ended = started.ended()
    assert ended.code == 130, ended.err
    assert launching.left_over(tmp_path) == []
    ends = [summary(tmp_path / "sweep" / job) for job in "01"]
    assert [end["state"] for end in ends] == ["stopped", "stopped"]
    assert ends[int(again)]["steps"] > stopped_at
    assert not (tmp_path / "sweep" / "2").exists()
    told = "".join(p.read_text() for p in (tmp_path / "sweep" / ".submitit").rglob("*.err"))
    assert f"job {again} goes on from its last checkpoint" in told


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are read from /proc")
def test_a_job_that_is_being_started_again_hears_of_the_end_too() -> None:
    """The shell stands for submitit's process, which starts a training anew when the first one has left."""
    shell = subprocess.Popen(["sh", "-c", "sleep 60; first=$?; sleep 60; test $first$? != 00"])  # 1 where both have slept well
    try:
        end([Running(0, [], None, SimpleNamespace(_process=shell))])
        assert shell.poll() == 0
    finally:
        shell.kill()


def test_slots_are_equal_and_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "core_numbers", lambda: list(range(7)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-a,5,6,7")
    first, second = slots.deal(2)
    assert (first.gpus, second.gpus) == (("3", "GPU-a"), ("5", "6"))
    assert (first.cores, second.cores) == ((0, 1, 2), (3, 4, 5))
    with pytest.raises(ConfigError, match="shows 5 GPU"):
        slots.deal(6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [slot.cores for slot in slots.deal(9)] == [(i % 7,) for i in range(9)]
    assert not any(slot.gpus for slot in slots.deal(9))


def test_a_missing_plugin_is_one_line_and_only_when_it_is_asked_for(tmp_path: Path) -> None:
    """Four commands, forked from a program that has imported the command alone: each has a Hydra that has done nothing yet."""
    asked = [["-m", *BASE, "seed=0,1", "sweep.parallel_jobs=2"], ["-m", *BASE, "seed=0,1", "hydra/launcher=slurm"],
             [*BASE, "--cfg", "job"], ["--help"]]  # fmt: skip
    code = ("import os, sys; sys.modules['hydra_plugins.hydra_submitit_launcher'] = None\n"
            "from isobatch.cli import command, main; import hydra.main\n"
            f"for words in {asked}:\n"
            "    pid = os.fork()\n"
            "    if not pid: sys.argv[1:] = words; main(); sys.exit(0)\n"
            "    status = os.waitpid(pid, 0)[1]\n"
            "    print('ended with', os.waitstatus_to_exitcode(status), file=sys.stderr, flush=True)\n")  # fmt: skip
    ended = run([sys.executable, "-c", code], tmp_path)
    assert ended.code == 0 and not ended.tracebacks(), ended.err
    ends = [line for line in ended.err.splitlines() if line.startswith("ended with")]
    assert ends == [f"ended with {code}" for code in (2, 2, 0, 0)], ended.err
    said = ended.own_lines()
    assert len(said) == 2 and all("pip install 'isobatch[slurm]'" in line for line in said), said
    assert said[0].startswith("isobatch: sweep.parallel_jobs=2: needs the package hydra-submitit-launcher; ")
    assert said[1].startswith("isobatch: hydra/launcher=slurm: its plugin is not installed; ")


SBATCH = """#!{python}
import os, re, subprocess, sys
text = open(sys.argv[1]).read()
open({record!r}, "w").write(text)
for task in range(int(re.search(r"--array=0-(\\d+)", text)[1]) + 1):
    subprocess.Popen(["bash", sys.argv[1]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={{
        **os.environ, "SLURM_JOB_ID": str(70 + task), "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": str(task),
        "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "{tasks}", "SLURM_JOB_NODELIST": "localhost", "SLURM_NODEID": "0"}})
print("Submitted batch job 70")
"""
SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
log = words[words.index("--error") + 1].replace("%A_%a", "70_" + os.environ["SLURM_ARRAY_TASK_ID"])
command = words[next(i for i, word in enumerate(words) if "python" in word):]
ranks = [subprocess.Popen(command, env={{**os.environ, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)}},
                          stderr=open(log.replace("%t", str(r)), "w"))
         for r in range(int(os.environ["SLURM_NTASKS"]))]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


def test_the_presets_compose() -> None:
    with hydra_patches.active(), initialize_config_dir(str(conf_folder()), version_base="1.3"):
        for words, key, value in [
            (["hydra/launcher=slurm"], "hydra.launcher.max_num_timeout", 20),
            (["hydra/launcher=local"], "hydra.launcher.timeout_min", 525600),
            (["hydra/sweeper=search"], "hydra.sweeper.n_trials", 20),
            (["hydra/sweeper=optuna"], "hydra.sweeper.sampler.seed", 0),
        ]:
            assert OmegaConf.select(compose("config", words, return_hydra_config=True), key) == value


def test_parallel_jobs_limit_the_array_and_other_launchers_keep_their_own_number() -> None:
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher

    config = OmegaConf.create({"sweep": {"parallel_jobs": 4}, "hydra": {"sweep": {"dir": "sweep"}, "sweeper": "BasicSweeper"}})

    class RayLauncher: ...

    def make() -> SlurmLauncher:
        launcher = SlurmLauncher(array_parallelism=256)
        launcher.setup(hydra_context=None, task_function=None, config=config)
        return launcher

    chosen = launchers.choose(make, None, None, config)
    assert chosen.launcher.launcher.params["array_parallelism"] == 4 and not chosen.launcher.slots
    with pytest.raises(ConfigError, match="RayLauncher has its own"):
        launchers.choose(RayLauncher, None, None, config)


@pytest.mark.slow
def test_slurm_gets_an_array_whose_tasks_are_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through stand-ins for sbatch and srun, since there is no cluster; everything else is the real thing."""
    monkeypatch.setattr(launching, "LIMIT_S", 220)  # four processes import torch at once
    tools, record = tmp_path / "bin", tmp_path / "submitted.sh"
    tools.mkdir()
    filled = {"python": sys.executable, "record": str(record), "tasks": 2}
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("sacct", "#!/bin/sh\n"), ("scancel", "#!/bin/sh\n")):
        (tools / name).write_text(text.format(**filled) if "{" in text else text)
        (tools / name).chmod(0o755)
    ended = run([*TRAIN, "hydra/launcher=slurm", "hydra.launcher.tasks_per_node=2", "hydra.launcher.partition=gpu",
                 "steps=2", "parallel=ddp", "batch.effective=48,0", NO_REPORT], tmp_path,
                PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")  # fmt: skip
    script = record.read_text()
    for option in ("--array=0-1%2", "--partition=gpu", "--gpus-per-node=1", "--time=240", "--signal=USR2@120",
                   "--nodes=1", "--ntasks-per-node=2"):  # fmt: skip
        assert f"#SBATCH {option}" in script
    assert ended.code == 1, ended.err
    done = summary(tmp_path / "sweep" / "0")
    assert done["state"] == "completed" and done["plan"]["world_size"] == 2
    assert summary(tmp_path / "sweep" / "1")["state"] == "failed"
    assert len(lines(ended, "batch.effective=0: ")) == 1


@pytest.mark.slow
def test_optuna_gets_the_objective_and_a_refused_trial_does_not_end_the_study_silently(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="pip install 'isobatch[optuna]'")
    words = ["steps=2", "hydra.sweeper.n_trials=3", "optimizer.lr=interval(0.0001,0.1)", "batch.effective=choice(0,48)"]
    ended = run([*TRAIN, *words, "hydra/sweeper=search", NO_REPORT,
                 "hydra.sweeper.sampler.seed=1", "hydra.sweeper.max_failure_rate=1"], tmp_path)  # fmt: skip
    jobs = [summary(tmp_path / "sweep" / job) for job in "012"]
    values = [job["final"]["eval/accuracy"] for job in jobs if job["state"] == "completed"]
    refused = [job for job in jobs if job["state"] == "failed"]
    assert values and refused, "another seed, please"
    assert ended.code == 1, ended.err  # a trial was refused, and the study went on
    assert len(lines(ended, "batch.effective=0: ")) == len(refused)
    found = (tmp_path / "sweep" / "optimization_results.yaml").read_text()
    assert f"best_value: {max(values)}" in found and "optimizer.lr" in found
