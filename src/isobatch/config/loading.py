"""From plain data to the typed tree: types, ranges, choices, and what no group can see alone."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from isobatch.batch_plan import resolve_batch
from isobatch.checks import complaint, way_to_option
from isobatch.config.schema import NESTED, Config, Settings
from isobatch.config.tables import TABLES
from isobatch.errors import ConfigError

MOST_KNOWN = 256  # merged groups of settings, of up to 50 kB each


def load(plain: Mapping[str, Any]) -> Config:
    """Build the typed tree from the composed, resolved, plain data.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, a choice that no table has, or settings that
            contradict each other.
    """
    names = plain.get("imports") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError("imports", names, "is no list of modules", "set imports=[my_package.models]")
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError("imports", name, f"cannot be imported ({error})",
                              f"set imports=[{name[:-3]}], the module's name" if name.endswith(".py") else
                              "install the package or put its folder on PYTHONPATH") from None  # fmt: skip
    scalars = {key: value for key, value in plain.items() if key not in {*TABLES, *NESTED}}
    nested = {key: typed(cls, attributes(plain.get(key, {})), f"{key}.") for key, cls in NESTED.items()}
    settings = typed(Settings, scalars, "")
    groups = {group: options(group, plain.get(group)) for group in TABLES}
    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(Settings)}
    values |= nested
    values["plain"] = in_types(plain, {**values, **groups})
    config = Config(**{**values, **groups})
    check_together(config)
    return config


def attributes(node: Any) -> Any:
    """`node` with names that Python takes: `replay.from` is its attribute `start`."""
    return {"start" if key == "from" else key: value for key, value in node.items()} if isinstance(node, Mapping) else node


def in_types(plain: Mapping[str, Any], built: Mapping[str, Any]) -> dict[str, Any]:
    """`plain` with the values that were `built` from it: a number that came as text (out of the environment) is a number in
    config.yaml, in a comparison and on resume too.
    """

    def one(value: Any, now: Any) -> Any:
        simple = isinstance(now, bool | int | float | str) or now is None
        return now if simple or (isinstance(now, list) and isinstance(value, list)) else value

    found: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping):
            options = built.get(key)
            found[key] = {name: one(v, getattr(options, name, v)) for name, v in value.items()}
        else:
            found[key] = one(value, built.get(key, value))
    return found


def refuse_interpolations(node: Any, key: str) -> None:
    """Raise ConfigError for text that OmegaConf would resolve: a config that somebody else made could read the environment.

    What Hydra composes for a person is resolved before it comes here.
    """
    if isinstance(node, str) and "${" in node:
        raise ConfigError(key, node[:60], "holds an interpolation in finished data", "write the value itself")
    children = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        refuse_interpolations(child, f"{key}.{name}" if key else str(name))


def options(group: str, node: Any) -> Any:
    """The options dataclass that `node["name"]` names in the group's table, filled from the rest of `node`."""
    table = TABLES[group]
    name = node.get("name") if isinstance(node, Mapping) else None
    if not isinstance(name, str) or name not in table:
        near = difflib.get_close_matches(str(name), table, n=3) or sorted(table)
        way_out = f"choose one of {', '.join(near)}, or type imports=[module] where one of your own is registered"
        raise ConfigError(f"{group}.name", name, f"no such {group}", way_out)
    return typed(table[name], node, group + ".")


def typed(cls: type, node: Mapping[str, Any], prefix: str) -> Any:
    """`cls` built from `node` with OmegaConf's conversions; its complaints become one line with the full key."""
    known = {f.name for f in dataclasses.fields(cls)}
    refuse_interpolations(node, prefix.rstrip("."))  # a model's options may come from a checkpoint
    if not isinstance(node, Mapping):
        raise ConfigError(prefix.rstrip("."), node, "is a group of settings", f"set {prefix}{min(known)} and others in it")
    for key in node:
        if key not in known:
            what = f"{prefix[:-1]}={node['name']}" if "name" in node else prefix.rstrip(".") or "isobatch"
            raise ConfigError(prefix + str(key), node[key], f"{what} has no such option",
                              way_to_option(prefix, str(key), known - {"name"}, TABLES.get(prefix[:-1], {})))  # fmt: skip
    try:
        return OmegaConf.to_object(_merged(cls, node))
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        value: Any = node
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else value
        problem = complaint(str(error.msg or error).splitlines()[0])
        raise ConfigError(prefix + key, value, problem, "see the comments in conf/ for the values it takes") from None


def _merged(cls: type, node: Mapping[str, Any]) -> Any:
    """`node` in the types of `cls`. A job does it before its ranks begin and in each; a sweep's jobs are alike."""
    key = cls, repr(node)  # which tells 1, 1.0, True and "1" apart
    if key not in _known:
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[key] = OmegaConf.merge(_structured(cls), dict(node))
    return _known[key]


_known: dict[tuple[type, str], Any] = {}
_structured = functools.cache(OmegaConf.structured)  # merging copies it; for every job of a sweep it would be made anew


def check_together(config: Config) -> None:
    """What no group can see alone."""
    micro = config.batch.micro if config.batch.micro != "auto" else None
    replicas = config.parallel.known_replicas
    if config.batch.micro != "auto":
        # without the number of replicas only what holds for every one of them can be checked yet; a resumed run keeps
        # the shards that it was cut into, and its accumulation follows
        fresh = config.resume is None
        resolve_batch(config.batch.effective, micro, config.accumulation.steps if replicas and fresh else None, replicas or 1,
                      config.batch.shard if fresh else None)  # fmt: skip
    elif config.batch.effective is None:
        raise ConfigError("batch.effective", None, "batch.micro=auto needs an effective batch to divide",
                          "set batch.effective=48")  # fmt: skip
    config.parallel.check_with(config)
    config.clip.check_with(config.max_grad_norm)
    config.audit.check_with(config)
    config.debug.check_with(config)
    config.profile.check_with(config)
    if config.resume is None and hasattr(config.scheduler, "check_with"):
        config.scheduler.check_with(config)
    if config.device == "cpu" and (devices := getattr(config.parallel, "devices", None)):
        raise ConfigError("parallel.devices", devices, "names GPUs, and device=cpu uses none",
                          "set device=null or parallel.devices=null")  # fmt: skip
    if config.augment.name != "none" and config.data.kind != "images":
        raise ConfigError("augment.name", config.augment.name, f"data={config.data.name} are no images",
                          "set augment=none")  # fmt: skip


def check_inputs(config: Config) -> None:
    """What has to lie on this machine before anything starts (folders, files); not needed to read a config.

    Raises:
        ConfigError: it does not.
    """
    check = getattr(config.data, "check", None)
    if check is not None:
        check()
