"""`accumulation=5`: a group in which every number is a choice."""

from __future__ import annotations

import re
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

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

    active = False  # Hydra keeps a plugin for as long as the process lives, whoever's program runs in it

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if NumberPath.active:
            for group in sorted(NUMBERED):
                search_path.append("isobatch", f"{NumberSource.scheme()}://{group}")


_override_value = Override.value


def value_of_choice(self: Override) -> Any:
    """Hydra refuses a number as the choice of a group ("must be a string or a list. Got int"), so it gets its text."""
    value = _override_value(self)
    return str(value) if self.key_or_group in NUMBERED and isinstance(value, (int, float)) else value
