"""The process that W&B runs in: reads one JSON message a line from standard input until the run or the trainer ends.

A script of its own that imports the standard library and wandb only. Beside the trainer it costs it no import, no lock
and no wait; a trainer that is killed leaves a closed pipe here, so that its run is closed as failed, with every row.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

SOURCES = (".py", ".pyi", ".yaml", ".yml", ".toml", ".ipynb", ".sh")
NO_SOURCE = {"wandb", "outputs", "multirun", "artifacts", "node_modules", "__pycache__"}


ROOM = 64 << 10  # bytes; W&B's file is written in blocks of 32 KiB


def send(kind: str, **content: Any) -> None:
    """A message to the trainer, which may be gone."""
    with contextlib.suppress(OSError):
        print(json.dumps([kind, content]), flush=True)


def answers(url: str, limit_s: float) -> bool:
    """Whether something at `url` speaks HTTP within `limit_s`, names and connections included."""
    heard = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=limit_s).close()
        except urllib.error.HTTPError:
            pass  # an error page is an answer
        except Exception:
            return
        heard.set()

    # looking up a name has no time limit of its own, hence the thread
    threading.Thread(target=ask, daemon=True).start()
    return heard.wait(limit_s)


def open_run(wandb: Any, job: dict[str, Any], began: float) -> Any:
    """The run: online if asked for and possible, else offline. Says which, and why."""
    mode = job["mode"]
    if mode == "online" and not answers(job["base_url"], job["probe_s"]):
        send("note", text=f"{job['base_url']} does not answer, so the run is written offline")
        mode = "offline"
    before = run_folders(job)
    try:
        run = init(wandb, job, mode)
    except Exception as error:
        if mode == "offline":
            raise
        send("note", text=f"the server did not take the run ({one_line(error)}), so it is written offline")
        wandb.teardown()  # else the same id is "in use"
        for folder in run_folders(job) - before:  # of the try: one run leaves one folder
            shutil.rmtree(folder, ignore_errors=True)
        run = init(wandb, job, "offline")
        mode = "offline"
    # `samples` and not W&B's own step: it means the same for every batch size, and a resumed run goes on in it
    run.define_metric("samples")
    run.define_metric("*", step_metric="samples")
    run_folder = os.path.dirname(run.settings.files_dir.rstrip("/")) if mode == "offline" else ""
    send("started", mode=mode, id=run.id, url=(run.url or "") if mode == "online" else "", folder=run_folder,
        seconds=time.monotonic() - began)  # fmt: skip
    return run


def run_folders(job: dict[str, Any]) -> set[Path]:
    parent = Path(job["init"].get("dir") or os.environ.get("WANDB_DIR") or ".")
    return set(parent.glob(f"*wandb/run-*-{job['init']['id']}"))


def init(wandb: Any, job: dict[str, Any], mode: str) -> Any:
    trainer = os.getppid()
    wanted = {
        "silent": True,
        "console": "off",  # a progress bar is no log; train.log is
        "init_timeout": job["init_s"],
        "finish_timeout": job["finish_timeout_s"],
        "stop_fn": lambda: os.kill(trainer, signal.SIGTERM),  # "Stop run" in the browser: a checkpoint, then the end
        # the private ones below may go with any version, so they are passed only where they exist
        "x_transaction_log_flush_interval": 1.0,  # 15 by default: a machine that dies would take 15 s of rows along
        "x_graphql_retry_max": 1,
        "x_graphql_timeout_seconds": 3.0,
        "x_disable_stats": not job["system_metrics"],
        "x_stats_pid": trainer,
        "x_stats_track_process_tree": True,
    }
    settings = wandb.Settings(**{key: value for key, value in wanted.items() if key in wandb.Settings.model_fields})
    return wandb.init(mode=mode, settings=settings, reinit="create_new", resume="allow", **job["init"])


class Messages:
    """What the trainer can ask for, by name."""

    def __init__(self, wandb: Any, run: Any):
        self.wandb, self.run = wandb, run

    def log(self, row: dict[str, Any]) -> None:
        self.run.log(row)

    def histograms(self, samples: int, histograms: dict[str, Any]) -> None:
        made = {key: self.wandb.Histogram(np_histogram=tuple(pair)) for key, pair in histograms.items()}
        self.run.log({"samples": samples, **made})

    def predictions(self, row: dict[str, Any], columns: list[str], rows: list[list[Any]]) -> None:
        from PIL import Image

        table = self.wandb.Table(columns=columns)
        for png, *values in rows:
            picture = Image.open(io.BytesIO(base64.b64decode(png)))
            table.add_data(self.wandb.Image(picture), *values)
        self.run.log({**row, "predictions": table})

    def report(self, row: dict[str, Any], images: dict[str, str], tables: dict[str, list[Any]]) -> None:
        pictures = {key: self.wandb.Image(path) for key, path in images.items()}
        made = {key: self.wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
                for key, (columns, rows) in tables.items()}  # fmt: skip
        self.run.log({**row, **pictures, **made})

    def checkpoint(self, folder: str, beside: list[str], name: str, aliases: list[str], metadata: dict[str, Any],
                   registry: str | None, limit_s: float) -> None:  # fmt: skip
        """An artifact that a training can go on from: the checkpoint, and the settings that it was trained with."""
        artifact = self.wandb.Artifact(name, type="model", metadata=metadata)
        artifact.add_dir(folder)
        for path in beside:
            artifact.add_file(path, name=os.path.basename(path))
        logged = self.run.log_artifact(artifact, aliases=aliases)
        if registry is None:
            return
        if self.run.offline:
            send("note", text=f"the run is offline, so its checkpoint is not linked to {registry}")
            return
        logged.wait(timeout=max(1, int(limit_s)))
        self.run.link_artifact(logged, registry)

    def use(self, key: str, name: str) -> None:
        """What the run began with: in its config, and online as lineage."""
        self.run.config.update({f"artifact/{key}": name})
        if not self.run.offline:
            self.run.use_artifact(name)

    def code(self, folder: str) -> None:
        self.run.log_code(folder, include_fn=lambda path: path.endswith(SOURCES), exclude_fn=of_no_source)

    def alert(self, title: str, text: str, level: str) -> None:
        self.run.alert(title=title, text=text, level=level, wait_duration=0.001)

    def files(self, paths: list[str]) -> None:
        """Copies, below a folder of their own: W&B has a config.yaml too, and a run folder may be gone before the upload."""
        folder = Path(self.run.dir) / "isobatch"
        folder.mkdir(exist_ok=True)
        for path in paths:
            shutil.copyfile(path, folder / os.path.basename(path))
            self.run.save(str(folder / os.path.basename(path)), base_path=self.run.dir, policy="now")

    def summary(self, values: dict[str, Any]) -> None:
        self.run.summary.update(values)


def of_no_source(path: str, root: str) -> bool:
    """What lies below a hidden folder, or one that programs write into."""
    return any(part.startswith(".") or part in NO_SOURCE for part in Path(path).relative_to(root).parts[:-1])


def full(folder: str) -> bool:
    """Whether the disk takes nothing more, so that the run's own file ends too early."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free < ROOM
    return False


def one_line(error: object) -> str:
    return " ".join(str(error).split())[:200]


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whatever ends the trainer, it is the trainer that ends this
    began = time.monotonic()
    sys.argv = json.loads(os.environ.pop("ISOBATCH_ARGV", "[]")) or sys.argv  # the command that W&B records
    try:
        import wandb
    except Exception as error:
        send("missing", text=one_line(error))
        return
    send("imported")
    messages = (json.loads(line) for line in sys.stdin)
    first = next(messages, None)
    if first is None:
        return  # refused before the run began
    try:
        run = open_run(wandb, first[1], began)
    except Exception as error:
        send("note", text=f"no run could be opened ({one_line(error)}); metrics are in metrics.jsonl")
        for _ in messages:  # so that the trainer's pipe never fills
            pass
        return
    does, exit_code, told = Messages(wandb, run), 1, False  # failed, unless the trainer lives to say otherwise
    for kind, content in messages:
        try:
            if kind == "finish":
                exit_code = content["exit_code"]
                break
            getattr(does, kind)(**content)
        except Exception as error:
            if not told:
                send("note", text=f"{kind} was not recorded ({one_line(error)})")
            told = True
    began = time.monotonic()
    try:
        run.finish(exit_code=exit_code)
        late = run.settings.mode == "online" and time.monotonic() - began > first[1]["finish_timeout_s"]
    except Exception:
        late = True
    send("finished", late=late, full=full(run.settings.files_dir), folder=os.path.dirname(run.settings.files_dir.rstrip("/")))


if __name__ == "__main__":
    main()
