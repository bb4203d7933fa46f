"""What this project teaches Hydra: numbers as choices of `accumulation`, and run folders that nothing can share.

Importing this module installs all of it, for command lines, sweeps and hydra.compose alike.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf, open_dict, read_write

NUMBERED = {"accumulation"}  # groups in which every number is a choice


class NumberSource(ConfigSource):
    """`number://GROUP` behind conf/ answers GROUP/<anything> that has no file with `steps: <anything>`.

    It refuses nothing: Hydra composes all jobs of a sweep before it starts the first, so an error here would take the
    good jobs down with the bad one. The group's dataclass refuses what is no positive integer, job by job.
    """

    @staticmethod
    def scheme() -> str:
        return "number"

    def _choice(self, config_path: str) -> str | None:
        match = re.fullmatch(re.escape(self.path) + r"/([^/]+?)(\.yaml)?", config_path)
        return match[1] if match else None

    # Hydra passes config_path= by keyword, so the parameters' names are part of the interface
    def load_config(self, config_path: str) -> ConfigResult:
        choice = self._choice(config_path) or ""
        steps = int(choice) if re.fullmatch(r"-?[0-9]{1,9}", choice) else choice
        return ConfigResult(provider=self.provider, path=self.full_path(), header={"package": None},
                            config=OmegaConf.create({"name": self.path, "steps": steps}))  # fmt: skip

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") in ("", self.path)

    def is_config(self, config_path: str) -> bool:
        return self._choice(config_path) is not None

    def list(self, config_path: str, results_filter: Any) -> list[str]:
        return []


class NumberPath(SearchPathPlugin):
    """Puts the numbers behind conf/, where files win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for group in sorted(NUMBERED):
            search_path.append("isobatch", f"{NumberSource.scheme()}://{group}")


_instantiate_launcher = Plugins.instantiate_launcher
_choose: Callable[..., Any] | None = None  # sweeps.launchers.choose, which stands above this file


def _launcher_of_sweep(self: Plugins, hydra_context: Any, task_function: Any, config: Any) -> Any:
    """Every sweeper asks for its launcher here, so here `sweep.dry_run` and `sweep.parallel_jobs` get their say."""
    from isobatch.errors import ConfigError

    def make() -> Any:
        return _instantiate_launcher(self, hydra_context, task_function, config)

    try:
        return make() if _choose is None else _choose(make, hydra_context, task_function, config)
    except ConfigError as refusal:
        print(f"isobatch: {refusal}", file=sys.stderr, flush=True)
        raise SystemExit(refusal.exit_code) from None  # Hydra would print a stack for any Exception


def without_hydra(config: Any) -> Any:
    """A copy of a job's config as the job gets it."""
    job = copy.deepcopy(config)
    with read_write(job), open_dict(job):
        del job["hydra"]
    return job


_override_value = Override.value


def _value_of_choice(self: Override) -> Any:
    """Hydra refuses a number as the choice of a group ("must be a string or a list. Got int"), so it gets its text."""
    value = _override_value(self)
    return str(value) if self.key_or_group in NUMBERED and isinstance(value, (int, float)) else value


class Stamp:
    """Resolver `${stamp:outputs}`: outputs/<date>/<time>, once per launch and for no other launch."""

    def __init__(self) -> None:
        self.claiming = False  # only a launch that will run jobs makes the folder; --cfg and compose() do not
        self._paths: dict[str, str] = {}
        self.made: list[Path] = []

    def __call__(self, parent: str) -> str:
        if parent not in self._paths:
            self._paths[parent] = self._agreed(parent)
        return self._paths[parent]

    def _agreed(self, parent: str) -> str:
        """Under torchrun a restart gets the first attempt's folder back."""
        if not self.claiming or "TORCHELASTIC_RUN_ID" not in os.environ:
            return self._new(parent)
        from isobatch.launch.torchrun import run_folder

        return run_folder(parent, self._new)

    def _new(self, parent: str) -> str:
        path = Path(parent, datetime.now().strftime("%Y-%m-%d/%H-%M-%S"))
        if not self.claiming:
            return str(path)
        for folder in (Path(parent), path.parent):
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                self.made.append(folder.absolute())
        for number in count(1):
            candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)  # another launch may just have released it
                candidate.mkdir()
            except FileExistsError:  # another launch of this second
                continue
            self.made.append(candidate.absolute())
            return str(candidate)
        raise AssertionError("unreachable")

    def release(self, used: Path | None = None) -> None:
        """Remove the folders that were made for nothing: composing asks for outputs/ and multirun/ alike."""
        for folder in reversed(self.made):
            if used is None or not used.is_relative_to(folder):
                with suppress(OSError):  # somebody else works in it
                    folder.rmdir()


STAMP = Stamp()


def help_screen(conf: Path, program: str = "train.py", width: int = 112) -> str:
    """What `--help` shows: conf/hydra/help/isobatch.yaml with the groups of `conf` and their choices filled in."""
    groups = sorted(folder for folder in conf.iterdir() if folder.is_dir() and folder.name != "hydra")
    lines = []
    for group in groups:
        choices = sorted(file.relative_to(group).with_suffix("").as_posix() for file in group.rglob("*.yaml"))
        if group.name in NUMBERED:
            choices = [*(name for name in choices if not name.isdigit()), "any positive integer"]
        if choices:
            lines += textwrap.wrap(f"{group.name:<13} {', '.join(choices)}", width, subsequent_indent=" " * 14)
    text = OmegaConf.create({"hydra": {"help": OmegaConf.load(conf / "hydra/help/isobatch.yaml")}}).hydra.help.template
    text = text.replace("$APP_CONFIG_GROUPS", "\n".join(f"  {line}" for line in lines) + "\n")
    if not program.endswith(".py"):  # the console script
        text = text.replace("python train.py", Path(program).name.ljust(len("python train.py")))
    return str(text).rstrip()


def install(arguments: Sequence[str] = (), choose_launcher: Callable[..., Any] | None = None) -> None:
    """Register everything.

    Args:
        arguments: the command line that a launch was given (none: nothing will be run).
        choose_launcher: (make, hydra_context, task_function, config) -> the launcher of a sweep; None = as Hydra does.
    """
    global _choose
    _choose = choose_launcher
    Override.value = _value_of_choice  # type: ignore[method-assign]
    Plugins.instantiate_launcher = _launcher_of_sweep  # type: ignore[method-assign,assignment]
    Plugins.instance().register(NumberSource)
    Plugins.instance().register(NumberPath)
    # every sweep ends in a comparison; a class that Hydra is to call is named here, in code, never in a config file
    ConfigStore.instance().store(
        group="hydra/callbacks", name="isobatch",
        node={"report": {"_target_": "isobatch.sweeps.callback.SweepReport", "tolerance": "${sweep.tolerance}",
                         "enabled": True}},
    )  # fmt: skip
    # cached in the config, so that a job which a launcher plugin runs elsewhere finds the same folder
    OmegaConf.register_new_resolver("stamp", STAMP, replace=True, use_cache=True)
    asks = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc", "--version"}
    STAMP.claiming = bool(arguments) and not asks & {word.partition("=")[0] for word in arguments}


install()
