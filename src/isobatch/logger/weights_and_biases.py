"""Weights & Biases as the trainer sees it: messages to a process that nothing here ever waits for, but at the end."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import re
import secrets
import signal
import string
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.errors import ConfigError
from isobatch.logger import access, artifacts, job_facts
from isobatch.logger.protocol import Logger, RunInfo, Table
from isobatch.run_folder import layout
from isobatch.run_folder.rows import name_of

if TYPE_CHECKING:
    from torch import nn

    from isobatch.logger.options import WeightsAndBiases
    from isobatch.logger.predictions import Predictions

log = logging.getLogger("isobatch")

IMPORT_S = 60.0  # for the other process to import wandb; it began with the set-up of the run, so this is no wait
PROBE_S = 3.0  # for the server to answer anything at all
INIT_S = 10.0  # for it to take the run
LARGEST_FILE = 64 << 20  # bytes of one of them
NOT_FINITE = re.compile(r"train/loss is (nan|-?inf)")
OPEN_S = 25.0  # for it to open the run, at worst: the probe, a try online, and then offline


class WeightsAndBiasesLogger(Logger):
    """One run, from the main rank."""

    def __init__(self, options: WeightsAndBiases, info: RunInfo, found: access.Access):
        self.options, self.info, self.access = options, info, found
        self.how_to_look: list[str] = []
        self.wants_predictions, self.wants_each = options.predictions, options.predictions_at == "evaluations"
        self._watched = 0
        self._alerted: set[str] = set()
        self._logged: Collection[tuple[int, str]] = ()
        self._imported, self._over = threading.Event(), threading.Event()
        self._missing = self._last_words = ""
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("wandb_process.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8",
            errors="replace", env={**os.environ, "ISOBATCH_ARGV": json.dumps(sys.argv)},
            start_new_session=True,  # Ctrl-C is the trainer's, which then finishes the run
        )  # fmt: skip
        self._outbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, daemon=True, name="wandb sender")
        self._sender.start()
        threading.Thread(target=self._listen, daemon=True, name="wandb listener").start()

    def start(self, plan: Mapping[str, Any], run_id: str | None = None, samples: int = 0,
              logged: Collection[tuple[int, str]] = ()) -> None:  # fmt: skip
        """Open the run, in the other process.

        Raises:
            ConfigError: wandb cannot be imported.
        """
        self._imported.wait(IMPORT_S)
        if self._missing:
            raise ConfigError("logger", "wandb", f"wandb cannot be imported ({self._missing})",
                              "pip install wandb, or set logger=none")  # fmt: skip
        facts = job_facts.read(self.info.run_dir)
        self.run_id = choose_id(run_id, facts, self.info)
        self._logged = logged if self.run_id == run_id else ()
        if self.access.why:
            log.info("W&B: offline, %s", self.access.why)
        self._post("open", mode=self.access.mode, base_url=self.access.base_url, init=self._init(facts, plan),
                   system_metrics=self.options.system_metrics,
                   finish_timeout_s=self.options.finish_timeout_s, probe_s=PROBE_S, init_s=INIT_S)  # fmt: skip
        for key, name in artifacts.used(self.info.plain).items():
            self._post("use", key=key, name=name)
        if self.options.code is not None:
            self._post("code", folder=self.options.code)

    def _init(self, facts: job_facts.JobFacts, plan: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of wandb.init, without those that an agent has put into the environment."""
        options, environ = self.options, os.environ
        alone = f"{self.info.run_dir.parent.name}/{self.info.run_dir.name}"
        arguments = {
            "id": self.run_id,
            "project": None if environ.get("WANDB_PROJECT") else options.project,
            "entity": None if environ.get("WANDB_ENTITY") else options.entity,
            "dir": None if environ.get("WANDB_DIR") else str(self.info.run_dir),
            "name": options.run_name or environ.get("WANDB_NAME") or (",".join(facts.differing) or alone)[:120],
            "group": environ.get("WANDB_RUN_GROUP") or self.info.group or facts.group,
            "job_type": environ.get("WANDB_JOB_TYPE") or str(self.info.plain.get("task", "train")),
            "tags": list(options.tags) or None,
            "notes": options.notes,
            # an agent locks the keys it sweeps (`accumulation` stays its choice), so the integers have their own names
            "config": {**self.info.plain, **{f"plan/{key}": value for key, value in plan.items()},
                       "run_dir": str(self.info.run_dir), **({} if facts.number is None else {"job": facts.number})},
        }  # fmt: skip
        return {key: value for key, value in arguments.items() if value is not None}

    def log(self, row: Mapping[str, Any]) -> None:
        if name_of(row) not in self._logged:  # a history can be added to alone
            self._post("log", row=dict(row))
        loss = row.get("train/loss")
        if isinstance(loss, float) and not math.isfinite(loss):
            self._alert("nonfinite", "loss is not finite", f"train/loss is {loss} at step {row.get('step')}")

    def _alert(self, kind: str, title: str, text: str) -> None:
        """Each kind once."""
        if kind in self.options.alerts and kind not in self._alerted:
            self._alerted.add(kind)
            level = "INFO" if kind == "finished" else "ERROR"
            self._post("alert", title=f"{self.info.run_dir.name}: {title}"[:63], text=text[:1000], level=level)

    def _tell_ending(self, summary: Mapping[str, Any]) -> None:
        """How it ended, as an alert: of a loss that is no number as that, and of a failure as that; a stop is neither."""
        state, error = summary.get("state"), str(summary.get("error"))
        if state == "failed":
            if NOT_FINITE.match(error):
                self._alert("nonfinite", "loss is not finite", error)
            self._alert("failed", "failed", error)
        elif state != "stopped":
            best = ", ".join(f"{metric} {value:.4g}" for metric, value in (summary.get("best") or {}).items())
            self._alert("finished", str(state), f"{summary.get('steps')} steps; best {best or 'not known'}")

    def _save_files(self) -> None:
        """Small files of the run folder, as they are now."""
        paths = [self.info.run_dir / name for name in self.info.files]
        there = [str(path) for path in paths if path.is_file() and path.stat().st_size <= LARGEST_FILE]
        if there and self.options.save_files:
            self._post("files", paths=there)

    def watch(self, row: Mapping[str, Any], model: nn.Module) -> None:
        if self.options.histograms == "none" or name_of(row) in self._logged:
            return
        self._watched += 1
        if (self._watched - 1) % self.options.histograms_every == 0:
            from isobatch.logger.histograms import histograms

            self._post("histograms", samples=row["samples"], histograms=histograms(model, self.options.histograms))

    def predictions(self, row: Mapping[str, Any], predictions: Predictions) -> None:
        from isobatch.logger.predictions import COLUMNS, encoded

        self._post("predictions", row=dict(row), columns=list(COLUMNS), rows=encoded(predictions))

    def report(self, row: Mapping[str, Any], images: Mapping[str, Path], tables: Mapping[str, Table]) -> None:
        self._post("report", row={"samples": row["samples"]}, images={k: str(path) for k, path in images.items()},
                   tables={k: [list(columns), [list(r) for r in rows]] for k, (columns, rows) in tables.items()})  # fmt: skip

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close the run and wait for it, at most `finish_timeout_s` and what opening it may still take."""
        if self.run_id is not None:
            self._post("summary", values=_flat(summary))
            self._tell_ending(summary)
            self._save_files()
            folder = self.info.run_dir / layout.CHECKPOINTS / self.options.log_checkpoints
            if self.options.log_checkpoints != "none" and folder.exists():
                metadata = {key: summary.get(key) for key in ("steps", "best", "weights_sha256")}
                beside = [self.info.run_dir / name for name in artifacts.OF_THE_RUN]
                self._post("checkpoint", folder=str(folder), beside=[str(path) for path in beside if path.is_file()],
                           name=f"checkpoint-{self.run_id}",
                           metadata=metadata, registry=self.options.registry, limit_s=self.options.finish_timeout_s,
                           aliases=[self.options.log_checkpoints, f"step-{summary.get('steps')}"])  # fmt: skip
            self._post("finish", exit_code=exit_code)
        self._outbox.put(None)
        try:
            self._process.wait(OPEN_S + self.options.finish_timeout_s if self.run_id else 2.0)
            self._over.wait(1.0)  # its last words
        except subprocess.TimeoutExpired:
            if self.run_id:
                log.warning("W&B: gave up waiting; `wandb sync` uploads what is in %s", self.info.run_dir / "wandb")
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _post(self, kind: str, **content: Any) -> None:
        self._outbox.put(json.dumps([kind, content], default=str) + "\n")

    def _send(self) -> None:
        """A thread, because a pipe that is full would block whoever writes to it."""
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(OSError, ValueError):  # the other end is gone; the listener has said so
            while (line := self._outbox.get()) is not None:
                pipe.write(line)
                pipe.flush()
        with suppress(OSError):
            pipe.close()

    def _listen(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        with pipe:
            for line in pipe:
                try:
                    kind, content = json.loads(line)
                except ValueError:
                    self._last_words = line.strip() or self._last_words  # a library's print
                    continue
                self._heard(kind, content)
                if kind in ("finished", "missing"):
                    break
            else:
                if self._process.wait() and self.run_id:
                    words = access.redacted(self._last_words)
                    log.warning("W&B: ended unexpectedly (%s); metrics are in metrics.jsonl", words)
        self._imported.set()
        self._over.set()

    def _heard(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "imported":
            self._imported.set()
        elif kind == "missing":
            self._missing = content["text"]
        elif kind == "note":
            log.warning("W&B: %s", access.redacted(content["text"]))
        elif kind == "started" and content["mode"] == "online":
            log.info("W&B: %s", content["url"])
            self.how_to_look = [content["url"]]
        elif kind == "started":
            self.how_to_look = [f"wandb leet {content['folder']}", f"wandb sync {content['folder']}"]
        elif kind == "finished" and content["full"]:
            log.warning("W&B: the disk of %s is full, so its file lacks rows, and no `wandb sync` brings them back",
                        content["folder"])  # fmt: skip
            self.how_to_look = [line for line in self.how_to_look if not line.startswith("wandb sync")]
        elif kind == "finished" and content["late"]:
            log.warning("W&B: the upload is not complete; `wandb sync %s` completes it", content["folder"])
            self.how_to_look.append(f"wandb sync {content['folder']}")


def choose_id(resumed: str | None, facts: job_facts.JobFacts, info: RunInfo) -> str:
    """An agent's id, else that of the run that is resumed, else a new one.

    Jobs of a sweep that all start from another run's checkpoint, and evaluations of one, are runs of their own.
    """
    given = os.environ.get("WANDB_RUN_ID")
    if given and facts.sweep is None:
        return given
    source = info.plain.get("resume")
    its_own = source is None or Path(source).resolve() == info.run_dir.resolve()
    if resumed and info.trains and (its_own or facts.sweep is None):
        return resumed
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def _flat(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of summary.json that compare runs; the last row of every metric is there already."""
    plain = ("state", "steps", "updates", "skipped_steps", "weights_sha256", "error")
    values = {key: summary.get(key) for key in plain}
    for group in ("best", "time", "perf"):
        values.update({f"{group}/{key}": value for key, value in (summary.get(group) or {}).items()})
    for rank in summary.get("ranks") or []:
        peak = rank["peak_memory_mb"]
        values[f"memory/rank{rank['rank']}_mb"] = next(iter(peak.values())) if isinstance(peak, dict) else peak
    return {key: value for key, value in values.items() if value is not None}
