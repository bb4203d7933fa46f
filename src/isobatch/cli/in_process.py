"""A job inside somebody else's program (a notebook, a script): as the command runs it, but nothing of it stays behind.

Hydra composes as for a command line, in this process, which may use Hydra for purposes of its own: its one state of a process
(GlobalHydra, HydraConfig) is put back. Nothing parses sys.argv and nothing ends the interpreter; every ending is an exception.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.version import VersionBase
from omegaconf import DictConfig

from isobatch import hydra_patches, launch, sweeps
from isobatch.config import conf_folder, plain_config
from isobatch.errors import ConfigError, JobFailed, Stopped
from isobatch.logger import artifacts
from isobatch.run_folder import layout, lock
from isobatch.runtime.distributed import ranks_from_environment

GLOBALS = (GlobalHydra, HydraConfig, VersionBase)


def run_job(words: Sequence[str]) -> Path:
    """Run the job that `words` (as on a command line) describe; returns its run folder.

    Raises:
        ConfigError: refused, nothing was trained. JobFailed: it failed. KeyboardInterrupt: Ctrl-C, after a checkpoint.
        Stopped: another signal, after a checkpoint.
    """
    words = [str(word) for word in words]
    if ranks_from_environment().world_size > 1:
        raise ConfigError("parallel", "torchrun", "every rank would run a training of its own from here",
                          "start one process with parallel.nproc, or give torchrun the command (train.py)")  # fmt: skip
    dashed = next((word for word in words if word.startswith("-")), None)
    if dashed is not None:
        raise ConfigError("overrides", dashed, "is an option of the command", "name settings alone: key=value")
    endings: list[BaseException] = []
    folders: list[Path] = []

    def job(cfg: DictConfig) -> None:
        """Hydra would make an ending of its own of what is raised here."""
        facts = HydraConfig.get()
        folders.append(Path(facts.runtime.output_dir))
        hydra_patches.STAMP.release(folders[0])
        try:
            _run(cfg, folders[0], Path(facts.runtime.cwd), list(facts.overrides.task))
        except BaseException as ending:
            endings.append(ending)

    words = artifacts.fetched(words, Path.cwd())
    with _hydra_untouched(), hydra_patches.active(["run", *words]):
        try:
            from isobatch.cli.command import show_left_out  # whose import tells Hydra which version's rules hold

            version.setbase("1.3")
            show_left_out(words)
            here = Hydra.create_main_hydra2("isobatch", create_config_search_path(str(conf_folder())))
            here.run("config", job, words, with_log_configuration=False)
        except SystemExit as refusal:  # of Hydra's own, worded by hydra_patches
            said = str(refusal.code).removeprefix("isobatch: ")
            raise ValueError(said) from None
        finally:
            hydra_patches.STAMP.release()
    if endings:
        ending = endings[0]
        if isinstance(ending, Stopped) and ending.signum == signal.SIGINT:
            raise KeyboardInterrupt(str(ending)) from None
        raise ending.with_traceback(None) if isinstance(ending, ConfigError | JobFailed | Stopped) else ending
    return folders[0]


def _run(cfg: DictConfig, run_dir: Path, cwd: Path, words: list[str]) -> None:
    from isobatch.cli.command import record

    with lock.held(run_dir), launch.stops_settled(run_dir), _logged(run_dir):
        record(cfg, run_dir)
        with launch.settling(run_dir):
            plain = plain_config(cfg, cwd, words)
            sweeps.check_alone(plain)
        for line in hydra_patches.left_out():
            logging.getLogger("isobatch").info("%s", line)
        with _no_main():
            launch.run(plain, run_dir)


@contextmanager
def _hydra_untouched() -> Iterator[None]:
    """Hydra's state of this process is put aside, and put back."""
    before = {cls: Singleton._instances.pop(cls, None) for cls in GLOBALS}
    try:
        yield
    finally:
        for cls, instance in before.items():
            Singleton._instances.pop(cls, None)
            if instance is not None:
                Singleton._instances[cls] = instance


@contextmanager
def _logged(run_dir: Path) -> Iterator[None]:
    """train.log, and plain words to standard output; the handlers of the program are left alone."""
    root, ours, level = logging.getLogger(), logging.getLogger("isobatch"), logging.getLogger("isobatch").level
    file = logging.FileHandler(run_dir / layout.LOG, encoding="utf-8", delay=True)
    file.setFormatter(logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] - %(message)s"))
    screen = logging.StreamHandler(sys.stdout)
    screen.setFormatter(logging.Formatter("%(message)s"))
    root.addHandler(file)
    ours.addHandler(screen)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.setLevel(level)
        ours.removeHandler(screen)
        root.removeHandler(file)
        file.close()


@contextmanager
def _no_main() -> Iterator[None]:
    """Processes that are started inside do not read the program's own file again: it need not guard itself against that."""
    main: Any = sys.modules["__main__"]
    before = {name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(before)
