"""What this project teaches Hydra: numbers as choices of `accumulation`, run folders that nothing can share, recipes as
layers, refusals in one line.

Hydra has one set of classes for a whole process, in which other programs that use Hydra may run: everything is in force
while one of this project's own commands is (`active`), and taken back after it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf, open_dict, read_write

from isobatch.errors import ConfigError
from isobatch.hydra_patches import composing, kept, layers, refusals
from isobatch.hydra_patches.folders import STAMP, Stamp
from isobatch.hydra_patches.numbers import NUMBERED, NumberPath, NumberSource, value_of_choice

__all__ = ["NUMBERED", "STAMP", "Stamp", "active", "install", "left_out", "without_hydra"]

_instantiate_launcher = Plugins.instantiate_launcher
_choose: Callable[..., Any] | None = None  # sweeps.launchers.choose, which stands above this file


def _launcher_of_sweep(self: Plugins, hydra_context: Any, task_function: Any, config: Any) -> Any:
    """Every sweeper asks for its launcher here, so here `sweep.dry_run` and `sweep.parallel_jobs` get their say."""

    def make() -> Any:
        return _instantiate_launcher(self, hydra_context, task_function, config)

    try:
        return make() if _choose is None else _choose(make, hydra_context, task_function, config)
    except ConfigError as refusal:
        print(f"isobatch: {refusal}", file=sys.stderr, flush=True)
        raise SystemExit(refusal.exit_code) from None  # Hydra would print a stack for any Exception


SEARCH = "isobatch.sweeps.search.Search"
_is_plugin = Plugins.is_in_toplevel_plugins_module


def _is_plugin_or_ours(clazz: str) -> bool:
    """Hydra takes plugins from its own packages alone; one in hydra_plugins would be there for every program."""
    return clazz == SEARCH or _is_plugin(clazz)


# (class or module, function) -> what stands in its place
METHODS: dict[tuple[Any, str], Any] = {
    (Hydra, "get_mode"): composing.get_mode,
    (composing.FileConfigSource, "load_config"): composing.load_config,
    (composing.hydra_s, "_create_interpolation_map"): composing.interpolation_map,
    (composing.omegaconf_s, "get_yaml_loader"): composing.yaml_loader,
    (composing.hydra_version, "_get_version"): composing.minor_version,
    (Override, "value"): value_of_choice,
    (Plugins, "instantiate_launcher"): _launcher_of_sweep,
    (Plugins, "is_in_toplevel_plugins_module"): staticmethod(_is_plugin_or_ours),
    (Hydra, "run"): refusals.run,
    (Hydra, "multirun"): refusals.multirun,
    (Sweeper, "validate_batch_is_legal"): kept.validate_batch_is_legal,
    (ConfigLoaderImpl, "load_sweep_config"): kept.load_sweep_config,
    (ConfigLoaderImpl, "load_configuration"): refusals.load_configuration,
    (ConfigLoaderImpl, "_compose_config_from_defaults_list"): layers.compose,
    (ConfigLoaderImpl, "_apply_overrides_to_config"): staticmethod(refusals.apply_overrides),
}
ASKS = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc", "--version"}


def without_hydra(config: Any) -> Any:
    """A copy of a job's config as the job gets it."""
    job = copy.deepcopy(config)
    with read_write(job), open_dict(job):
        del job["hydra"]
    return job


def left_out() -> list[str]:
    """Options of recipes that the config composed last does without, a line for each recipe and group."""
    return list(layers.LEFT_OUT)


def install(arguments: Sequence[str] = (), choose_launcher: Callable[..., Any] | None = None) -> None:
    """Put everything in force.

    Args:
        arguments: the command line that a launch was given (none: nothing will be run).
        choose_launcher: (make, hydra_context, task_function, config) -> the launcher of a sweep; None = as Hydra does.
    """
    global _choose
    _choose = choose_launcher
    for (cls, method), function in METHODS.items():
        setattr(cls, method, function)
    Plugins.instance().register(NumberSource)
    Plugins.instance().register(NumberPath)
    NumberPath.active = True
    # every sweep ends in a comparison; a class that Hydra is to call is named here, in code, never in a config file
    ConfigStore.instance().store(
        group="hydra/callbacks", name="isobatch",
        node={"report": {"_target_": "isobatch.sweeps.callback.SweepReport", "tolerance": "${sweep.tolerance}",
                         "enabled": True}},
    )  # fmt: skip
    ConfigStore.instance().store(group="hydra/sweeper", name="isobatch", node={"_target_": SEARCH})
    # cached in the config, so that a job which a launcher plugin runs elsewhere finds the same folder
    OmegaConf.register_new_resolver("stamp", STAMP, replace=True, use_cache=True)
    STAMP.claiming = bool(arguments) and not ASKS & {word.partition("=")[0] for word in arguments}


@contextmanager
def active(arguments: Sequence[str] = (), choose_launcher: Callable[..., Any] | None = None) -> Iterator[None]:
    """`install` for as long as the block runs; then Hydra's classes are as they were before it."""
    global _choose
    before = {(cls, method): cls.__dict__[method] for cls, method in METHODS}
    numbered, chooses = NumberPath.active, _choose
    try:
        install(arguments, choose_launcher)
        yield
    finally:
        for (cls, method), function in before.items():
            setattr(cls, method, function)
        NumberPath.active, _choose = numbered, chooses
        kept.forget()
        if not numbered:  # not within another block
            for group in ("callbacks", "sweeper"):
                ConfigStore.instance().repo["hydra"][group].pop("isobatch.yaml", None)
            OmegaConf.clear_resolver("stamp")
