"""The command: Hydra composes, `launch` runs, and this file turns every ending into its words and its exit code.

0 done · 1 failed, or refused by Hydra itself · 2 refused · 130 Ctrl-C · 143 SIGTERM · 129 SIGHUP · 138 SIGUSR1. A sweep runs
all its jobs and ends with 1 if one of them did not end well.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from isobatch import hydra_patches, launch, sweeps
from isobatch.cli import agent, dotenv
from isobatch.cli.help_screen import help_screen, own_folders
from isobatch.cli.swept_overrides import WORD, reachable
from isobatch.cli.verbs import run_verb
from isobatch.config import conf_folder, plain_config
from isobatch.console import streams
from isobatch.console.streams import to_stderr
from isobatch.errors import ConfigError, Stopped
from isobatch.launch import parent, schedulers
from isobatch.logger import artifacts
from isobatch.resume import saved_settings
from isobatch.run_folder import layout, lock
from isobatch.run_folder.files import write_text
from isobatch.runtime import cores
from isobatch.runtime.distributed import joined, ranks_from_environment
from isobatch.sweeps import launchers

log = logging.getLogger("isobatch")

MOST_TOLD = 10  # lines about settings that are not taken over
HYDRA_OPTIONS = {"--cfg", "--package", "--config-path", "--config-name", "--config-dir", "--info"}


class JobNotDone(CompactHydraException):
    """Tells Hydra that a job of a sweep did not end well: it goes on with the next one and exits with 1 at the end."""


@hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")
def one_job(cfg: DictConfig) -> float | None:
    """Run one job and return its best value for sweepers that search. Called by Hydra."""
    job = HydraConfig.get()
    run_dir = Path(job.runtime.output_dir)
    sweep = job.mode == RunMode.MULTIRUN
    plain: dict[str, Any] = {}
    hydra_patches.STAMP.release(run_dir)
    try:
        with lock.held(run_dir), launch.stops_settled(run_dir):
            with launch.settling(run_dir):
                record(cfg, run_dir)
                plain = plain_config(cfg, Path(job.runtime.cwd), job.overrides.task)
                if not sweep:
                    sweeps.check_alone(plain)
            if sweep:
                word, result = sweeps.earlier(plain, run_dir)
                if word != "new":
                    to_stderr(sweeps.line_of(word, job.job.num, run_dir))
                if word == "skip":
                    return result
            for line in hydra_patches.left_out():
                log.info("%s", line)
            return launch.run(plain, run_dir)
    except Stopped as stop:
        raise SystemExit(stop.exit_code) from None
    except ConfigError as refusal:
        if sweep and sweeps.skipped(plain, refusal, run_dir):
            to_stderr(f"isobatch: job {job.job.num} skipped: {refusal}")
            return None
        to_stderr(f"isobatch: {refusal}")
        line, code = str(refusal), refusal.exit_code
    except launch.RankFailed as failure:
        to_stderr(f"isobatch: {failure} (traceback in {run_dir / layout.LOG})" if sweep else failure.trace.rstrip())
        line, code = str(failure), failure.exit_code
    finally:
        close_log(run_dir)
    if sweep:
        raise JobNotDone(f"isobatch: job {job.job.num} did not end well: {line}")
    raise SystemExit(code)


def record(cfg: DictConfig, run_dir: Path) -> None:
    """RUN/.hydra: what was typed and what came of it. Hydra would write it before the folder is this process's own."""
    whole: Any = HydraConfig.instance().cfg
    hydra_cfg = OmegaConf.masked_copy(whole, "hydra")
    texts = {"config.yaml": cfg, "hydra.yaml": hydra_cfg, "overrides.yaml": hydra_cfg.hydra.overrides.task}
    try:
        (run_dir / ".hydra").mkdir(exist_ok=True)
        for name, node in texts.items():
            write_text(run_dir / ".hydra" / name, OmegaConf.to_yaml(node))
    except OSError as error:
        raise ConfigError("hydra.run.dir", run_dir, f"cannot be written (.hydra: {error.strerror})",
                          "set hydra.run.dir (hydra.sweep.dir) to a folder that can") from None  # fmt: skip


def close_log(run_dir: Path) -> None:
    """Let go of the job's log file: what Hydra says between jobs belongs in none of them."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent == run_dir:
            root.removeHandler(handler)
            with suppress(OSError):  # a full disk did not take its last lines; the ending still has to be told
                handler.close()


def main() -> None:
    """Entry point of train.py and of the console script."""
    streams.install()
    leaves = agent.watched()
    if (code_of_verb := run_verb(sys.argv[1:])) is not None:
        sys.exit(code_of_verb)
    for line in dotenv.read(Path.cwd()):
        to_stderr(f"isobatch: {line}")
    signal.signal(signal.SIGTERM, launch.early)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, launch.early)
    logging.raiseExceptions = False  # a line that train.log cannot take (disk full) is no reason for a traceback
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # `imports=[my_models]` finds the user's own module from the console script too
    cores.let_go()  # before torch reads it
    code = 1
    try:
        schedulers.join()
        joined()
        if ranks_from_environment().world_size > 1:
            parent.end_with_parent()
        if not ranks_from_environment().is_main:
            launch.follow()
        sys.argv[1:] = without_local_rank(sys.argv[1:])
        check_dashes(sys.argv[1:])
        check_config_dir(sys.argv[1:])
        launchers.check_plugins(sys.argv[1:])
        if {"--help", "-h"} & set(sys.argv[1:]):
            log.disabled = True  # that `head` has seen enough is no news
            try:
                print(help_screen(conf_folder(), sys.argv[0], own=own_folders(sys.argv[1:])), flush=True)
            finally:
                log.disabled = False
            sys.exit(0)
        sys.argv[1:] = artifacts.fetched(sys.argv[1:], Path.cwd())
        show_left_out(sys.argv[1:])
        sys.argv[1:] = reachable(sys.argv[1:])
        with hydra_patches.active(["run", *sys.argv[1:]], launchers.choose):
            if any(word.startswith("hydra/sweeper=") for word in sys.argv[1:]):
                from isobatch.sweeps.search import Search

                Plugins.instance().register(Search)
            one_job()
        code = 0 if launchers.all_done() else 1
    except ConfigError as refusal:
        code = refusal.exit_code
        to_stderr(f"isobatch: {refusal}")
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        to_stderr(f"isobatch: {launch.EARLY}")
    except SystemExit as leaving:
        launch.heard()
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            to_stderr(leaving.code)
        if isinstance(leaving, launch.Terminated) and ranks_from_environment().is_main:
            to_stderr(f"isobatch: {launch.EARLY}")
    finally:
        hydra_patches.STAMP.release()
        launch.finish(code)
    leaves(code)
    sys.exit(code)


def without_local_rank(words: list[str]) -> list[str]:
    """`words` less the `--local-rank=0` of torch.distributed.launch, which says it in the environment too."""
    own = {f"--local{dash}rank={os.environ.get('LOCAL_RANK')}" for dash in "-_"}
    return [word for word in words if word not in own]


def check_dashes(words: list[str]) -> None:
    """Refuse `--optimizer.lr=0.1`, which would get Hydra's usage text.

    Raises:
        ConfigError: with the word to write instead.
    """
    for word in words:
        match = re.fullmatch(r"(--[A-Za-z_][\w./@-]*)=(.*)", word)
        if match and match[1] not in HYDRA_OPTIONS:
            raise ConfigError(match[1], match[2], "settings have no dashes", f"write {word[2:]}")


def check_config_dir(words: list[str]) -> None:
    """Refuse a `--config-dir` that is not there; like whatever Hydra would refuse itself, with exit code 1."""
    for folder in own_folders(words):
        if not (Path.cwd() / folder).is_dir():
            raise SystemExit(f"isobatch: --config-dir={folder}: no such folder; name one with folders like conf/'s")


def show_left_out(words: list[str]) -> None:
    """A line for each setting of the run that `resume=` names which is not taken over.

    Raises:
        ConfigError: no such folder, or its settings cannot be read.
    """
    typed = {match["key"]: match["value"] for word in words if (match := WORD.fullmatch(word))}
    saved_settings.check_folder(typed.get("resume"))
    saved = saved_settings.SavedSettings.named(typed.get("resume"))
    lines = [line for key, line in saved.left_out.items() if key not in typed] if saved else []
    for line in [*lines[:MOST_TOLD], *([f"{len(lines) - MOST_TOLD} more settings"] if len(lines) > MOST_TOLD else [])]:
        to_stderr(f"isobatch: {line}")
