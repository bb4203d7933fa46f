"""MLflow: a run at a tracking server."""

from __future__ import annotations

import logging
import math
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from isobatch.errors import reason
from isobatch.logger import job_facts
from isobatch.logger.protocol import Logger, RunInfo
from isobatch.run_folder.rows import name_of

if TYPE_CHECKING:
    from isobatch.logger.options import MLflow

log = logging.getLogger("isobatch")

ID = "isobatch.id"  # the tag that a run is found again by: MLflow's own ids cannot be chosen
LONGEST, MOST = 500, 100  # characters of a parameter, parameters of a request: what every server takes
FINISH_S = 15.0


class MLflowLogger(Logger):
    """One run of the experiment `project`; its steps are `samples`.

    A thread of its own talks to the server, so no row waits for it. What it raises is told once and costs rows, not the
    training.
    """

    def __init__(self, options: MLflow, info: RunInfo):
        self.options, self.info = options, info
        self.uri = options.tracking_uri or os.environ["MLFLOW_TRACKING_URI"]
        self.how_to_look: list[str] = []
        self._told = False
        self._logged: Collection[tuple[int, str]] = ()
        self._client: Any = None
        self._run = ""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True, name="mlflow sender")

    def start(self, plan: Mapping[str, Any], run_id: str | None = None, samples: int = 0,
              logged: Collection[tuple[int, str]] = ()) -> None:  # fmt: skip
        self._logged = logged if run_id else ()
        self.run_id = run_id or secrets.token_hex(4)
        facts = job_facts.read(self.info.run_dir)
        folder = self.info.run_dir.absolute()
        params = {**_flat(self.info.plain), **{f"plan/{key}": str(value) for key, value in plan.items()}}
        tags = {ID: self.run_id, "run_dir": str(folder), "task": str(self.info.plain.get("task", "train")),
                **({"group": facts.group} if facts.group else {})}  # fmt: skip
        name = ",".join(facts.differing)[:120] or f"{folder.parent.name}/{folder.name}"
        self._work.put(lambda: self._open(name, params, tags))
        self._thread.start()

    def _open(self, name: str, params: dict[str, str], tags: dict[str, str]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(tracking_uri=self.uri)
        found = client.get_experiment_by_name(self.options.project)
        experiment = found.experiment_id if found else client.create_experiment(self.options.project)
        known = client.search_runs([experiment], filter_string=f"tags.`{ID}` = '{self.run_id}'", max_results=1)
        run = known[0] if known else client.create_run(experiment, tags=tags, run_name=name)
        self._client, self._run = client, run.info.run_id
        if known:  # its parameters stand
            client.update_run(self._run, status="RUNNING")
        else:
            made = [Param(key, value) for key, value in params.items()]
            for first in range(0, len(made), MOST):
                client.log_batch(self._run, params=made[first : first + MOST])
        where = f"{self.uri.rstrip('/')}/#/experiments/{experiment}/runs/{self._run}"
        self.how_to_look = [where if self.uri.startswith("http") else f"mlflow ui --backend-store-uri {self.uri}"]

    def log(self, row: Mapping[str, Any]) -> None:
        if name_of(row) in self._logged:
            return
        now = int(time.time() * 1000)
        numbers = {key: float(value) for key, value in row.items() if isinstance(value, int | float) and key != "samples"}
        step = int(row["samples"])

        def send() -> None:
            from mlflow.entities import Metric

            self._client.log_batch(self._run, metrics=[Metric(k, v, now, step) for k, v in numbers.items() if math.isfinite(v)])

        self._work.put(send)

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close the run and wait for it, a bounded time."""
        if self.run_id is None:
            return
        self._logged = ()
        status = "FINISHED" if exit_code == 0 else "FAILED" if summary.get("state") == "failed" else "KILLED"
        self.log({"samples": summary.get("samples") or 0,
                  **{f"best/{metric}": value for metric, value in (summary.get("best") or {}).items()}})  # fmt: skip

        def end() -> None:
            for key in ("state", "weights_sha256", "error"):
                if summary.get(key):
                    self._client.set_tag(self._run, key, str(summary[key])[:LONGEST])
            self._client.set_terminated(self._run, status)

        self._work.put(end)
        self._work.put(None)
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            self._tell(f"gave up waiting after {FINISH_S:.0f} s")

    def _send(self) -> None:
        while (do := self._work.get()) is not None:
            if self._told:
                continue
            try:
                do()
            except Exception as error:
                self._tell(reason(error))

    def _tell(self, problem: str) -> None:
        self._told = True
        with suppress(Exception):
            log.warning("mlflow: not recorded (%s); metrics are in metrics.jsonl", problem)


def _flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted key -> text."""
    found: dict[str, str] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)[:LONGEST]
    return found
