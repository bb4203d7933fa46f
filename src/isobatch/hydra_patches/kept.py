"""A sweeper composes all its jobs to see that they can be, and its launcher composes each of them once more: the first time
leaves for the second what it found, of as many jobs as are in memory at once anyhow (2 MB each).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf

from isobatch.hydra_patches import layers
from isobatch.runtime import garbage

_load = ConfigLoaderImpl.load_sweep_config
# what is typed -> (config, what it leaves out); in this module, as a loader is sent along with jobs that run elsewhere
_kept: dict[tuple[str, ...], tuple[DictConfig, list[str]]] = {}


def validate_batch_is_legal(self: Any, batch: Sequence[Sequence[str]]) -> None:
    """In place of Sweeper's: composes them all."""
    forget()
    loader = self.hydra_context.config_loader
    for number, overrides in enumerate(batch):
        config = _load(loader, self.config, list(overrides))
        if number < garbage.AT_ONCE:
            _kept[_key(self.config, overrides)] = config, list(layers.LEFT_OUT)


def load_sweep_config(self: Any, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
    """In place of ConfigLoaderImpl's. What is handed out will be changed, so once."""
    if (found := _kept.pop(_key(master_config, sweep_overrides), None)) is None:
        return _load(self, master_config, sweep_overrides)
    config, layers.LEFT_OUT[:] = found
    OmegaConf.copy_cache(from_config=master_config, to_config=config)  # what the sweep has resolved since: its folder
    return config


def _key(master: DictConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    typed: Any = OmegaConf.to_container(master.hydra.overrides.hydra, resolve=False)  # may name what only a job has
    return (str(master.hydra.job.config_name), *typed, *overrides)


def forget() -> None:
    _kept.clear()
