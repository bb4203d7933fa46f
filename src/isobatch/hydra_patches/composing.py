"""Work that Hydra does for each composition and that nobody looks at: a third of a composition, and one of a start's two."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import yaml
from hydra import version as hydra_version
from hydra._internal import defaults_list as hydra_s
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.default_element import ConfigDefault, GroupDefault, InputDefault
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf import _utils as omegaconf_s

from isobatch.config import conf_folder
from isobatch.hydra_patches.layers import OVERLAYS
from isobatch.hydra_patches.numbers import NUMBERED

Plugins.instance()  # executes the modules of Hydra's sources once more: a class imported before is not the one that loads
FileConfigSource: Any = SourcesRegistry.instance().resolve("file")
_load, _map, _mode = FileConfigSource.load_config, hydra_s._create_interpolation_map, Hydra.get_mode
minor_version = lru_cache(hydra_version._get_version)  # of Hydra's own constants, parsed for each entry of a defaults list
_yaml_loader = omegaconf_s.get_yaml_loader


@lru_cache
def yaml_loader() -> Any:
    """In place of OmegaConf's get_yaml_loader, which makes a class anew for each file: the same safe one, parsing in C where
    PyYAML can, in a ninth of the time."""
    safe = _yaml_loader()
    in_c: Any = getattr(yaml, "CSafeLoader", None)
    tables = {
        name: getattr(safe, name) for name in ("yaml_constructors", "yaml_implicit_resolvers")
    }  # whoever adds to the other
    return safe if in_c is None else type("Loader", (in_c, safe), tables)


@lru_cache(maxsize=512)
def parsed(path: str, *state: int) -> tuple[dict[str, str | None], Any]:
    """(header, content) of a file, as long as its `state` is the same: all jobs of a sweep read the same files."""
    with open(path, encoding="utf-8") as file:
        header = ConfigSource._get_header_dict(file.read(512))
        file.seek(0)
        try:
            return header, OmegaConf.load(file)
        except (yaml.YAMLError, OSError) as error:  # the second: OmegaConf's, of what is no mapping
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from None


def load_config(self: Any, config_path: str) -> ConfigResult:
    """In place of FileConfigSource's."""
    path = os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path)))
    try:
        seen = os.stat(path)
    except OSError:
        return _load(self, config_path)
    header, content = parsed(path, seen.st_mtime_ns, seen.st_size, seen.st_ino)
    return ConfigResult(provider=self.provider, path=f"{self.scheme()}://{self.path}", config=copy.deepcopy(content),
                        header=dict(header))  # fmt: skip


def interpolation_map(overrides: hydra_s.Overrides, defaults_list: list[InputDefault], self_added: bool) -> DictConfig:
    """In place of Hydra's: what `${...}` in a defaults list may name. Without any it is not read."""
    named = (d.path if isinstance(d, ConfigDefault) else d.value for d in defaults_list
             if isinstance(d, ConfigDefault | GroupDefault))  # fmt: skip
    return _map(overrides, defaults_list, self_added) if any("$" in str(name) for name in named) else OmegaConf.create()


# what sets hydra.mode, or names a recipe that may: on the command line, in a file
TYPED = re.compile(rf"[+~]*(hydra(/|@|=|\.mode|\.searchpath)|({'|'.join(OVERLAYS)})[@=])")
IN_FILE = re.compile(rb"mode['\"]?\s*:\s*['\"]?(\$|[0-9]|RUN|MULTIRUN|RunMode)")
NAMED = re.compile(rf"^[^#\n]*[-\[{{,][^#\n]*\b({'|'.join(OVERLAYS)})\b[^:#\n]*:(?!\s*null\b)".encode(), re.MULTILINE)


def get_mode(self: Any, config_name: str | None, overrides: Sequence[str]) -> Any:
    """In place of Hydra.get_mode, which composes all of the config to read `hydra.mode`: None where nobody can have set it."""
    return _mode(self, config_name, list(overrides)) if may_be_set(self, config_name, overrides) else None


def may_be_set(hydra: Any, config_name: str | None, overrides: Sequence[str]) -> bool:
    conf = conf_folder()
    known = {"pkg://hydra.conf", "structured://", str(conf), f"file://{conf}", *(f"number://{group}" for group in NUMBERED)}
    if config_name != "config" or any(TYPED.match(word) for word in overrides):
        return True
    if any(element.path not in known for element in hydra.config_loader.get_search_path().get_path()):
        return True
    folders = [folder for folder in conf.iterdir() if folder.name not in OVERLAYS]
    texts = [file.read_bytes() for entry in folders for file in (entry.rglob("*.yaml") if entry.is_dir() else [entry])]
    return any((b"hydra" in text and IN_FILE.search(text)) or NAMED.search(text) for text in texts)
