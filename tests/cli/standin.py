"""A run_job that trains nothing, for tests of the launcher; STANDIN (environment) says how it behaves."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from isobatch.errors import ConfigError, Stopped
from isobatch.launch import STOP
from isobatch.runtime.distributed import Ranks

log = logging.getLogger("standin")


def run_job(plain: dict[str, Any], run_dir: Path, ranks: Ranks) -> float | None:
    """Do what STANDIN asks of this rank and job: refuse, sleep, or fail, kill, leave, hang or stuck with a rank behind it."""
    what, here = os.environ.get("STANDIN", ""), f"{ranks.rank}"
    if os.environ.get("STANDIN_AT", str(plain["accumulation"]["steps"])) != str(plain["accumulation"]["steps"]):
        what = ""  # meant for another job of the sweep
    summary: dict[str, Any] = {"state": "failed", "error": None, "steps": 0}
    log.info("rank %d of %d in %s", ranks.rank, ranks.world_size, run_dir)
    log.warning("a warning of rank %d", ranks.rank)
    try:
        if what == f"fail{here}":
            raise RuntimeError(f"asked to fail on rank {here}")
        if what == "refuse":
            raise ConfigError("model.arch", "resnet5O", "no such model", "try resnet50")
        if what == f"leave{here}":
            os._exit(0)
        if what == f"kill{here}":
            os.kill(os.getpid(), signal.SIGKILL)
        if what.startswith("hang"):  # the others wait for this rank, which has failed without a word to the group
            if what == f"hang{here}":
                raise RuntimeError(f"rank {here} leaves")
            time.sleep(600)
        if what == f"stuck{here}":
            time.sleep(600)
        if what == "sleep":
            (run_dir / f"ready{here}").touch()
            print("READY", flush=True)
            while not ranks.agree(STOP.requested):
                time.sleep(0.05)
            time.sleep(float(os.environ.get("STANDIN_SAVE_S", "0.2")))
            (run_dir / "saved").touch()
            summary["state"] = "stopped"
            raise Stopped(ranks.agree(STOP.requested))
        ranks.agree(0)
        summary |= {"state": "completed", "steps": plain["accumulation"]["steps"]}
        mine = [str(run_dir), hashlib.sha256(json.dumps(plain).encode()).hexdigest()]
        summary["told"] = ranks.gather_objects(mine)  # where each rank works, and on what
        summary["seen"] = ranks.gather_objects([ranks.rank, os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES")])
    except Exception as error:
        summary["error"] = str(error)
        raise
    finally:
        if ranks.is_main and "Exit" not in str(sys.exc_info()[0]):
            summary["data_root"], summary["cwd"] = plain["data"].get("root"), os.getcwd()
            summary["resume"], summary["run_name"] = plain["resume"], plain["logger"].get("run_name")
            (run_dir / "summary.json").write_text(json.dumps(summary))
    return 0.5
