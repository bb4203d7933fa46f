"""`logger=mlflow`: a run at a tracking server, gone on with by a resumed one; what the server says costs no training."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from isobatch.config import options
from isobatch.errors import ConfigError
from isobatch.logger import Logger, RunInfo

PLAN = {"effective_batch": 48}
SUMMARY = {"state": "completed", "samples": 48, "best": {"eval/accuracy": 0.9}, "weights_sha256": "ab"}


class Server:
    """A stand-in for the package: what its client is called with, and the runs by tag."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.runs: dict[str, Any] = {}
        self.raises = ""

    def package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        server = self

        class Client:
            def __init__(self, tracking_uri: str):
                server.calls.append(("uri", tracking_uri))

            def get_experiment_by_name(self, name: str) -> Any:
                if server.raises:
                    raise OSError(server.raises)
                return None

            def create_experiment(self, name: str) -> str:
                return f"e-{name}"

            def search_runs(self, experiments: list[str], filter_string: str, max_results: int) -> list[Any]:
                return [run for tag, run in server.runs.items() if f"= '{tag}'" in filter_string]

            def create_run(self, experiment: str, tags: dict[str, str], run_name: str) -> Any:
                run = types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"r{len(server.runs)}"))
                server.runs[tags["isobatch.id"]] = run
                return run

            def __getattr__(self, name: str) -> Any:
                return lambda *args, **given: server.calls.append((name, *args, given))

        entities = types.ModuleType("mlflow.entities")
        entities.Param = entities.Metric = lambda *args: args  # type: ignore[attr-defined]
        mlflow = types.ModuleType("mlflow")
        mlflow.MlflowClient = Client  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mlflow", mlflow)
        monkeypatch.setitem(sys.modules, "mlflow.entities", entities)


def record(folder: Path, run_id: str | None = None, exit_code: int = 0, summary: Any = SUMMARY) -> Logger:
    node = options("logger", {"name": "mlflow", "project": "mine", "tracking_uri": "http://127.0.0.1:9"})
    logger: Logger = node.build(RunInfo(folder, {"seed": 3, "optimizer": {"lr": 0.1}}))
    logger.start(PLAN, run_id)
    logger.log({"step": 1, "samples": 48, "train/loss": 0.5, "nan": float("nan"), "weights": [1.0]})
    logger.finish(summary, exit_code)
    return logger


def test_what_the_server_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.package(monkeypatch)
    logger = record(tmp_path)
    assert logger.how_to_look == ["http://127.0.0.1:9/#/experiments/e-mine/runs/r0"]
    batches = [call for call in server.calls if call[0] == "log_batch"]
    params = dict(batches[0][2]["params"])
    assert params == {"seed": "3", "optimizer.lr": "0.1", "plan/effective_batch": "48"}
    sent = [(key, value, step) for key, value, _, step in batches[1][2]["metrics"]]
    assert sent == [("step", 1.0, 48), ("train/loss", 0.5, 48)]
    assert [metric[:2] for metric in batches[2][2]["metrics"]] == [("best/eval/accuracy", 0.9)]
    assert server.calls[-1][:3] == ("set_terminated", "r0", "FINISHED")
    again = record(tmp_path, logger.run_id, 1, {"state": "failed", "samples": 48, "error": "no memory"})
    assert again.run_id == logger.run_id and len(server.runs) == 1
    assert ("update_run", "r0", {"status": "RUNNING"}) in server.calls
    assert server.calls[-1][:3] == ("set_terminated", "r0", "FAILED")


def test_what_it_raises_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.raises = "no route"
    server.package(monkeypatch)
    record(tmp_path)
    assert caplog.messages == ["mlflow: not recorded (no route); metrics are in metrics.jsonl"]


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^logger=mlflow: .*not installed; pip install 'isobatch\[mlflow\]'"):
        options("logger", {"name": "mlflow"}).check()
    monkeypatch.setattr("isobatch.logger.options.need", lambda *given: None)
    with pytest.raises(ConfigError, match=r"^logger\.tracking_uri=null: names no server"):
        options("logger", {"name": "several", "loggers": ["csv", "mlflow"]}).check()


@pytest.mark.filterwarnings("ignore")  # its own
def test_a_run_and_its_resume_at_a_real_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    node = options("logger", {"name": "mlflow", "tracking_uri": str(tmp_path / "store")})
    run_id = None
    for step in (1, 2):
        logger = node.build(RunInfo(tmp_path, {"seed": 3}))
        logger.start(PLAN, run_id)
        logger.log({"step": step, "samples": 48 * step, "train/loss": 0.5})
        logger.finish(SUMMARY, 0)
        run_id = logger.run_id
    client = mlflow.MlflowClient(tracking_uri=str(tmp_path / "store"))
    (run,) = client.search_runs([client.get_experiment_by_name("isobatch").experiment_id])
    assert run.data.params["seed"] == "3" and run.data.tags["state"] == "completed" and run.info.status == "FINISHED"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")] == [48, 96]
