"""Recipes are layers: an option that a recipe sets belongs to the choice it was written for.

conf/config.yaml, then local/default.yaml (or the settings of the run that `resume` names, which needs no machine's), then
recipes (experiment/, plan/), then what is typed.
`experiment=digits ema=none` drops the recipe's `ema.decay`, which is of `ema=ema`; of `epochs` and `steps` the layer that
comes last decides, so that `steps=20` needs no `epochs=null`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.default_element import GroupDefault, ResultDefault
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, open_dict

from isobatch.config import TABLES
from isobatch.errors import ConfigError
from isobatch.resume.saved_settings import PLAN_GROUPS, SavedSettings

OVERLAYS = ("experiment", "plan")
LOCAL = "local"
LENGTH = {"epochs": "steps", "steps": "epochs"}  # of which one is null
LEFT_OUT: list[str] = []  # what the last composition dropped, a line each: the job tells it

_compose = ConfigLoaderImpl._compose_config_from_defaults_list
_apply = ConfigLoaderImpl._apply_overrides_to_config


class Layers:
    """Hydra's config files as one composition sees them.

    Args:
        repository: Hydra's. defaults: the files, in the order in which they are merged.
        typed: groups whose choice was typed. saved: what the run that is resumed was.

    Raises:
        ConfigError: a recipe that would land in a group of its own name.
    """

    def __init__(self, repository: Any, defaults: Sequence[ResultDefault], typed: set[str], saved: SavedSettings | None):
        self._repository, self._saved = repository, saved
        paths = {default.package: str(default.config_path) for default in defaults}
        self._final = {group: paths[group].removeprefix(f"{group}/") for group in TABLES if group in paths}
        self._replaced = {*typed, *(PLAN_GROUPS if "plan" in typed else ())}
        self._drop: dict[str, set[str]] = {}  # recipe -> its groups that are written for another choice
        self._aside: set[str] = set()  # files that set nothing
        self.left_out: list[str] = []
        chosen: dict[str, Any] = {}
        for default in defaults:
            path = str(default.config_path)
            if default.primary:
                self._primary = path
                chosen |= self._choices(path)
            elif path.partition("/")[0] == LOCAL and saved is not None:
                self._aside.add(path)
            elif path.partition("/")[0] in (*OVERLAYS, LOCAL):
                if default.package in (*OVERLAYS, LOCAL):
                    raise ConfigError(str(default.package), path.partition("/")[2],
                                      f"the file {path}.yaml would set options of a group {default.package}",
                                      "begin it with the line `# @package _global_`")  # fmt: skip
                own = self._choices(path)
                chosen |= own
                self._replaced |= own.keys()
                self._drop[path] = {group for group in TABLES if chosen.get(group) != self._final.get(group)}
                self._tell(path, chosen)

    def _choices(self, path: str) -> dict[str, Any]:
        """Group -> the choice that the defaults list of a file names."""
        listed = self._repository.load_config(path).defaults_list or ()
        return {str(entry.group).lstrip("/"): entry.value for entry in listed if isinstance(entry, GroupDefault)}

    def _tell(self, path: str, chosen: Mapping[str, Any]) -> None:
        body = self._repository.load_config(path).config
        for group in sorted(self._drop[path] & set(body)):
            options = ", ".join(f"{group}.{option}" for option in body[group] or ())
            self.left_out.append(f"{path} sets {options} for {group}={chosen.get(group)}: left out with "
                                 f"{group}={self._final.get(group)}")  # fmt: skip

    def load_config(self, config_path: str) -> ConfigResult:
        found: ConfigResult = self._repository.load_config(config_path)
        group = config_path.rpartition("/")[0]
        if config_path in self._aside:
            return dataclasses.replace(found, config=OmegaConf.create())
        if config_path in self._drop:
            return self._with(found, {}, self._drop[config_path])
        if self._saved is not None and config_path == self._primary:
            return self._with(found, self._saved.top, set())
        nested = next((name for name in self._final if config_path == f"{name}/{self._final[name]}"), group)
        if self._saved is not None and nested in self._saved.groups and nested not in self._replaced:
            return dataclasses.replace(found, config=OmegaConf.create(self._saved.groups[nested]))
        return found

    def _with(self, found: ConfigResult, settings: Mapping[str, Any], without: set[str]) -> ConfigResult:
        """`found` with `settings` on top, less the groups `without`, and with one of epochs and steps null."""
        body = copy.deepcopy(found.config)
        if not isinstance(body, DictConfig):
            return found
        with open_dict(body):
            for key in without & set(body):
                del body[key]
            for key, other in LENGTH.items():
                if body.get(key) is not None and other not in body:
                    body[other] = None
            for key, value in settings.items():
                OmegaConf.update(body, key, value, merge=False)
        return dataclasses.replace(found, config=body)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._repository, name)


def compose(self: Any, defaults: list[ResultDefault], repo: Any) -> DictConfig:
    """In place of ConfigLoaderImpl._compose_config_from_defaults_list."""
    typed = getattr(self, "_typed", {})
    groups = {key for key in typed if key in TABLES or key in OVERLAYS}
    layers = Layers(repo, defaults, groups, SavedSettings.named(typed.get("resume")))
    LEFT_OUT[:] = layers.left_out
    return _compose(self, defaults, layers)  # type: ignore[arg-type]  # what of a repository composing asks for


def length_of_typed(overrides: Sequence[Override], cfg: DictConfig) -> None:
    """The one of epochs and steps that is typed with a number takes the place of the other."""
    typed = {override.key_or_group: override.value() for override in overrides if not override.is_delete()}
    for key, other in LENGTH.items():
        if typed.get(key) is not None and other not in typed and other in cfg:
            cfg[other] = None
