"""The loggers against a W&B server on loopback: online, resumed, refused, unreachable, dying, killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from wandb_standin import KEY, StandIn, bare_environ, offline_files, read_offline

from isobatch import tasks
from isobatch.config import options
from isobatch.errors import ConfigError
from isobatch.logger import Logger, RunInfo, access, job_facts, weights_and_biases
from isobatch.logger.weights_and_biases import choose_id

PLAN = {"effective_batch": 48, "micro_batch": 16, "accumulation_steps": 3}
SUMMARY = {"state": "completed", "steps": 4, "samples": 192, "best": {"eval/accuracy": 0.9},
           "ranks": [{"rank": 0, "peak_memory_mb": 100.0}, {"rank": 1, "peak_memory_mb": 90.0}]}  # fmt: skip


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_wandb: None) -> Callable[..., None]:
    """Puts an environment in place of this one's W&B settings."""

    def put(**given: str) -> None:
        for key in [key for key in os.environ if key.startswith("WANDB_")]:
            monkeypatch.delenv(key)
        for key, value in {**bare_environ(tmp_path), **given}.items():
            monkeypatch.setenv(key, value)

    put()
    return put


def record(folder: Path, *, rows: int = 4, first: int = 1, run_id: str | None = None, exit_code: int = 0,
           plain: dict[str, Any] | None = None, before_finish: Callable[[Logger], None] = lambda logger: None,
           logged: Collection[tuple[int, str]] = (), **given: Any) -> Logger:  # fmt: skip
    """A run of a few rows through the whole protocol, without any training."""
    folder.mkdir(parents=True, exist_ok=True)
    node = options("logger", {"name": "wandb", "system_metrics": False, **given})
    node.check()
    config = {"task": "train", "seed": 3, "optimizer": {"lr": 0.1}, **(plain or {})}
    logger: Logger = node.build(RunInfo(folder, config))
    logger.start(PLAN, run_id, samples=48 * (first - 1), logged=logged)
    for step in range(first, first + rows):
        logger.log({"step": step, "samples": 48 * step, "train/loss": 1.0 / step})
    before_finish(logger)
    logger.finish(SUMMARY, exit_code)
    return logger


def killed(logger: Any) -> None:
    """This process, once its rows have gone through the pipe."""
    logger._outbox.put(None)
    logger._sender.join()
    os.kill(os.getpid(), signal.SIGKILL)


def test_online_run_and_its_resume_are_one_run(tmp_path: Path, environ: Callable[..., None]) -> None:
    with StandIn() as server:
        environ(**server.environ(tmp_path))
        logger = record(tmp_path / "a", mode="auto", tags=["quick"], notes="a note")
        assert list(logger.how_to_look) and "http" in logger.how_to_look[0]
        again = [(48 * 3, "train"), (48 * 4, "train")]  # killed after step 4, two steps after its checkpoint
        record(tmp_path / "b", run_id=logger.run_id, first=3, rows=6, mode="auto", tags=["quick"], logged=again)
    assert list(server.runs) == [logger.run_id]
    run = server.runs[str(logger.run_id)]
    assert run.values("samples") == [48 * step for step in range(1, 9)]
    assert run.exit == 0
    assert run.config["optimizer"] == {"lr": 0.1} and run.config["plan/accumulation_steps"] == 3
    assert run.summary["best/eval/accuracy"] == 0.9 and run.summary["memory/rank1_mb"] == 90.0
    assert run.meta["jobType"] == "train" and run.meta["tags"] == ["quick"] and run.meta["project"] == "isobatch"
    assert not offline_files(tmp_path / "a") or "offline-run" not in str(offline_files(tmp_path / "a")[0])


def test_server_that_dies_costs_the_upload_only(tmp_path: Path, environ: Callable[..., None]) -> None:
    with StandIn() as server:
        environ(**server.environ(tmp_path))

        def dies(logger: Logger) -> None:
            end = time.monotonic() + 100
            while not any(run.meta for run in server.runs.values()) and time.monotonic() < end:
                time.sleep(0.05)
            server.die()

        logger = record(tmp_path / "run", mode="online", finish_timeout_s=6, before_finish=dies)
        server.__dict__["die"] = lambda: None  # it is dead
    (file,) = offline_files(tmp_path / "run")
    assert read_offline(file).values("train/loss") == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert any(line.startswith("wandb sync ") for line in logger.how_to_look)


def test_unreachable_or_unwilling_server_means_offline(
    tmp_path: Path, environ: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the limits are what is looked at, not waited out: a server that is really slow has more
    monkeypatch.setattr(weights_and_biases, "PROBE_S", 0.5)
    monkeypatch.setattr(weights_and_biases, "INIT_S", 3.0)
    mute = socket.create_server(("127.0.0.1", 0))  # takes connections and never says a word
    environ(WANDB_BASE_URL=f"http://127.0.0.1:{mute.getsockname()[1]}", WANDB_API_KEY=KEY)
    record(tmp_path / "mute", mode="online")
    with StandIn() as server:
        server.accepts = False
        environ(**server.environ(tmp_path))
        record(tmp_path / "unwilling", mode="auto")
    mute.close()
    for name in ("mute", "unwilling"):
        (file,) = offline_files(tmp_path / name)
        assert "offline-run" in str(file) and len(read_offline(file).values("train/loss")) == 4
    lines = [line for line in caplog.text.splitlines() if "offline" in line]
    assert len(lines) == 2 and KEY not in caplog.text


def test_without_a_key_auto_is_offline_in_one_line(
    tmp_path: Path, environ: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    sweep = tmp_path / "multirun" / "2026-01-02" / "03-04-05"
    hydra = sweep / "1" / ".hydra"
    hydra.mkdir(parents=True)
    (hydra / "overrides.yaml").write_text("- accumulation=3\n- epochs=2\n- logger.notes=x\n")
    (hydra / "hydra.yaml").write_text(
        "hydra: {mode: MULTIRUN, job: {num: 1}, sweep: {dir: '${stamp:multirun}', subdir: '${hydra.job.num}'}}\n"
    )
    (sweep / "multirun.yaml").write_text("hydra: {overrides: {task: ['accumulation=1,3,6', epochs=2]}}\n")
    logger = record(sweep / "1", exit_code=1, histograms="gradients")
    (file,) = offline_files(tmp_path)
    run = read_offline(file)
    assert [line for line in caplog.messages if line.startswith("W&B")] == [
        "W&B: offline, no key found (`wandb login` or WANDB_API_KEY)"
    ]
    assert run.meta["run_group"] == "2026-01-02_03-04-05" and run.meta["display_name"] == "accumulation=3"
    assert run.meta["run_id"] == logger.run_id and run.exit == 1 and run.config["job"] == 1
    assert run.axes["*"] == "samples"
    assert logger.how_to_look == [f"wandb leet {file.parent}", f"wandb sync {file.parent}"]


def test_what_an_agent_sets_wins(tmp_path: Path, environ: Callable[..., None]) -> None:
    (tmp_path / "elsewhere").mkdir()
    environ(WANDB_MODE="offline", WANDB_RUN_ID="given1", WANDB_PROJECT="theirs", WANDB_ENTITY="them",
            WANDB_SWEEP_ID="sw1", WANDB_DIR=str(tmp_path / "elsewhere"))  # fmt: skip

    def rows_reach_the_disk(logger: Logger) -> None:
        """While the run goes on: what a machine that dies would lose."""
        end = time.monotonic() + 100
        while time.monotonic() < end:
            files = offline_files(tmp_path)
            if files and files[0].stat().st_size > 7 and len(read_offline(files[0]).values("train/loss")) == 4:
                return
            time.sleep(0.1)
        pytest.fail("no rows before the end of the run")

    logger = record(tmp_path / "run", project="mine", before_finish=rows_reach_the_disk)
    (file,) = offline_files(tmp_path)
    assert file.is_relative_to(tmp_path / "elsewhere")
    meta = read_offline(file).meta
    assert (logger.run_id, meta["run_id"], meta["project"], meta["entity"]) == ("given1", "given1", "theirs", "them")
    assert meta["sweep_id"] == "sw1"


def test_killed_trainer_loses_no_rows(tmp_path: Path, environ: Callable[..., None]) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]; from pathlib import Path; import test_logger as t\n"
        "t.record(Path(sys.argv[1]), mode='offline', before_finish=t.killed)"
    )
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run"), str(here), str(here.parent)], timeout=200)
    assert done.returncode == -signal.SIGKILL
    end, run = time.monotonic() + 100, None
    while time.monotonic() < end:  # the other process notices and closes the run
        files = offline_files(tmp_path)
        run = read_offline(files[0]) if files else None
        if run and run.exit is not None:
            break
        time.sleep(0.1)
    assert run is not None and run.exit == 1 and len(run.values("train/loss")) == 4


def test_disabled_starts_nothing(tmp_path: Path, environ: Callable[..., None]) -> None:
    for given in ({"WANDB_MODE": "disabled"}, {"WANDB_DISABLED": "true"}, {}):
        environ(**given)
        logger = record(tmp_path / "run", mode="auto" if given else "disabled")
        assert type(logger) is Logger
    assert list((tmp_path / "run").iterdir()) == []


def test_refusals_come_before_anything_is_built(tmp_path: Path, environ: Callable[..., None]) -> None:
    online = options("logger", {"name": "wandb", "mode": "online"})
    with pytest.raises(ConfigError, match=r"logger.mode=online.*WANDB_API_KEY"):
        online.check()
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    online.check()
    environ(WANDB_BASE_URL="https://wandb.example.org")  # that key is another server's
    with pytest.raises(ConfigError):
        online.check()
    settings = tmp_path / ".config" / "wandb"
    settings.mkdir(parents=True)
    (settings / "settings").write_text("[default]\nbase_url = https://api.wandb.ai\nmode = offline\n")
    environ()
    online.check()
    assert access.resolve("auto").mode == "offline" and access.resolve("online").mode == "online"
    assert access.redacted(f"bad key {KEY}") == "bad key (key)"


@pytest.mark.parametrize("module", ["wandb", "tensorboard"])
def test_a_missing_package_is_named(module: str, environ: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for name in (module, "several"):
        with pytest.raises(ConfigError, match=rf"package {module} is not installed.*logger=none"):
            options("logger", {"name": name}).check()


def test_a_broken_wandb_is_named_too(tmp_path: Path, environ: Callable[..., None]) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError('blocked')\n")
    environ(PYTHONPATH=str(tmp_path), ISOBATCH_COLD="1")
    with pytest.raises(ConfigError, match=r"wandb cannot be imported \(blocked\).*logger=none"):
        record(tmp_path / "run", mode="offline")


def test_several_loggers_get_everything(tmp_path: Path, environ: Callable[..., None]) -> None:
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = torch.nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    node = options("logger", {"name": "several", "mode": "offline", "histograms": "all", "system_metrics": False,
                              "loggers": ["csv", "wandb", "tensorboard"], "alerts": ["failed", "nonfinite"]})  # fmt: skip
    node.check()
    (tmp_path / "config.yaml").write_text("seed: 3\n")
    logger = node.build(RunInfo(tmp_path, {"task": "train"}))
    logger.start(PLAN)
    row = {"step": 1, "samples": 48, "train/loss": 0.5}
    logger.log(row)
    logger.watch(row, model)
    logger.log({"step": 2, "samples": 96, "train/loss": float("nan"), "eval/loss": 2.5})
    logger.log({"step": 3, "samples": 144, "train/loss": float("nan")})
    logger.finish({**SUMMARY, "state": "failed", "error": "train/loss is nan at step 2 on rank 0"}, 1)
    (file,) = offline_files(tmp_path)
    run = read_offline(file)
    found = run.history[1]["gradients/weight"]
    assert found["_type"] == "histogram" and sum(found["values"]) == 6
    assert [(text, level) for _, text, level in run.alerts] == [
        ("train/loss is nan at step 2", "ERROR"), ("train/loss is nan at step 2 on rank 0", "ERROR")]  # fmt: skip
    assert "isobatch/config.yaml" in run.files and "isobatch/plan.json" not in run.files
    (copy,) = (path for path in tmp_path.rglob("isobatch/config.yaml"))
    assert copy.read_text() == "seed: 3\n"
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "step,samples,train/loss,eval/loss", "1,48,0.5,", "2,96,nan,2.5", "3,144,nan,"]  # fmt: skip
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert next((e.step, e.value) for e in events.Scalars("train/loss")) == (48, 0.5)
    assert events.Histograms("weights/bias")[0].histogram_value.num == 2
    assert len(logger.how_to_look) == 4 and logger.run_id


def test_metrics_csv_goes_on_where_its_run_does(tmp_path: Path) -> None:
    node = options("logger", {"name": "csv"})
    node.check()
    for samples, steps in ((0, (1, 2, 3)), (96, (3, 4))):
        logger = node.build(RunInfo(tmp_path, {}))
        logger.start(PLAN, samples=samples)
        for step in steps:
            logger.log({"step": step, "samples": 48 * step, "train/loss": step / 10, "weights": [1.0]})
        logger.finish(SUMMARY, 0)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines == ["step,samples,train/loss", "1,48,0.1", "2,96,0.2", "3,144,0.3", "4,192,0.4"]
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("5,24")  # killed while it wrote
    logger = node.build(RunInfo(tmp_path, {}))
    logger.start(PLAN, samples=1000)
    logger.log({"step": 6, "samples": 288, "eval/loss": 1.0})
    logger.finish(SUMMARY, 0)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[0] == "step,samples,train/loss,eval/loss" and lines[-2:] == ["4,192,0.4,", "6,288,,1.0"]


def test_which_alerts_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, of its own kind alone; a run that was stopped is neither finished nor failed."""
    with pytest.raises(ConfigError, match=r"^logger\.alerts=done: is not a valid choice; choose one of failed"):
        options("logger", {"name": "wandb", "alerts": ["done"]})
    sent: list[str] = []
    logger = object.__new__(weights_and_biases.WeightsAndBiasesLogger)
    monkeypatch.setattr(logger, "_post", lambda kind, **content: sent.append(content["title"]), raising=False)
    logger.info, logger._alerted = RunInfo(Path("runs/a"), {}), set()
    summaries = {"completed": SUMMARY, "stopped": {"state": "stopped"}, "failed": {"state": "failed", "error": "no memory"}}
    for asked, states, expected in (
        (["finished"], ("stopped", "failed", "completed", "completed"), ["a: completed"]),
        (["failed"], ("stopped", "completed", "failed"), ["a: failed"]), ([], tuple(summaries), []),
    ):  # fmt: skip
        logger.options = options("logger", {"name": "wandb", "alerts": asked})
        sent.clear()
        logger._alerted.clear()
        for state in states:
            logger._tell_ending(summaries[state])
        assert sent == expected, asked


def test_predictions_are_pictures_in_a_table(tmp_path: Path, environ: Callable[..., None]) -> None:
    import torch

    from isobatch.logger.predictions import Predictions

    names = ("cat", "dog", "cow")
    shown = Predictions(torch.zeros(2, 1, 8, 8), torch.eye(3)[:2], torch.tensor([0, 2]), names, (0.3,), (0.4,))
    node = options("logger", {"name": "wandb", "mode": "offline", "predictions": 2, "system_metrics": False})
    logger = node.build(RunInfo(tmp_path, {"task": "train"}))
    logger.start(PLAN)
    logger.predictions({"samples": 48}, shown)
    logger.finish(SUMMARY, 0)
    (file,) = tmp_path.rglob("*.table.json")
    table = json.loads(file.read_text())
    assert [row[1:] for row in table["data"]] == [["cat", "cat", 1.0, True], ["dog", "cow", 1.0, False]]
    staged = [path for path in (tmp_path / ".local").rglob("*") if path.is_file()]  # an artifact, for `wandb sync`
    assert sum(path.read_bytes().startswith(b"\x89PNG") for path in staged) >= 1


def test_pictures_and_tables_of_an_evaluation(tmp_path: Path, environ: Callable[..., None]) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "confusion.png")
    logger = options("logger", {"name": "wandb", "mode": "offline", "system_metrics": False}).build(
        RunInfo(tmp_path / "run", {"task": "evaluate"}))  # fmt: skip
    logger.start(PLAN)
    table = ["name", "recall"], [["cat", 0.5], ["dog", None]]
    logger.report({"samples": 48, "step": 1}, {"confusion": tmp_path / "confusion.png"}, {"per_class": table})
    logger.finish(SUMMARY, 0)
    (file,) = tmp_path.rglob("*.table.json")
    written = json.loads(file.read_text())
    assert (written["columns"], written["data"]) == table
    (row,) = read_offline(offline_files(tmp_path)[0]).history
    assert row["confusion"]["_type"] == "image-file" and row["per_class"]["_type"] == "table-file" and row["samples"] == 48


@pytest.mark.parametrize(
    ("task", "resume", "sweep", "continues"),
    [
        ("train", "old", False, True), ("train", None, False, True), ("evaluate", "old", False, False),
        ("train", "old", True, False),  # -m resume=old optimizer.lr=1,2: two runs, and neither is the old one
        ("train", None, True, True), ("train", "run", True, True),  # the sweep's own job, resumed where it lies
    ],
)  # fmt: skip
def test_which_runs_are_continued(
    task: str, resume: str | None, sweep: bool, continues: bool, tmp_path: Path, environ: Callable[..., None]
) -> None:
    facts = job_facts.JobFacts(tmp_path if sweep else None)
    plain = {"task": task, "resume": resume and str(tmp_path / resume)}
    info = RunInfo(tmp_path / "run", plain, trains=tasks.TABLE[task].trains)
    assert (choose_id("abc", facts, info) == "abc") == continues
    environ(WANDB_RUN_ID="given1")
    assert (choose_id("abc", facts, info) == "given1") == (not sweep)


def test_facts_of_a_run_without_hydra_or_alone(tmp_path: Path) -> None:
    assert job_facts.read(tmp_path) == job_facts.JobFacts()
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- +plan=big\n- logger=none\n- resume=/somewhere\n")
    assert job_facts.read(tmp_path).differing == ("+plan=big",)


def test_a_full_disk_is_told_once_and_no_sync_is_promised(caplog: pytest.LogCaptureFixture) -> None:
    logger: Any = object.__new__(weights_and_biases.WeightsAndBiasesLogger)
    logger.how_to_look = ["wandb leet run", "wandb sync run"]
    logger._heard("finished", {"late": True, "full": True, "folder": "run"})
    assert caplog.text.count("is full, so its file lacks rows") == 1 and "completes it" not in caplog.text
    assert logger.how_to_look == ["wandb leet run"]
