"""The typed configuration: one tree, checked in one place, before any device is touched.

Hydra composes plain data from conf/; `load` turns it into dataclasses. A name in the data reaches a class only through
the group's table, so a config read from a run, a checkpoint or a server can never name code to run.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from isobatch import (
    accumulation,
    augment,
    checkpoint,
    data,
    ema,
    logger,
    loss,
    model,
    optimizer,
    parallel,
    precision,
    reduction,
    sampler,
    scheduler,
)
from isobatch.batch_plan import resolve_batch
from isobatch.checks import choice, complaint, positive, way_to_option, within
from isobatch.errors import ConfigError
from isobatch.planner.cost import CostOptions

TABLES: dict[str, dict[str, Any]] = {
    "parallel": parallel.TABLE,
    "precision": precision.TABLE,
    "sampler": sampler.TABLE,
    "accumulation": accumulation.TABLE,
    "reduction": reduction.TABLE,
    "data": data.TABLE,
    "augment": augment.TABLE,
    "model": model.TABLE,
    "loss": loss.TABLE,
    "optimizer": optimizer.TABLE,
    "scheduler": scheduler.TABLE,
    "ema": ema.TABLE,
    "checkpoint": checkpoint.TABLE,
    "logger": logger.TABLE,
}


def conf_folder() -> Path:
    """conf/ of the installed wheel, or of the repository that this file sits in."""
    packaged = Path(__file__).parent / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "conf"


def resolved(composed: Any) -> dict[str, Any]:
    """Hydra's composed config as plain data: interpolations resolved, nothing missing."""
    plain: dict[str, Any] = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore
    return plain


def to_yaml(plain: Mapping[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(dict(plain)))


def read_yaml(path: Path) -> dict[str, Any] | None:
    """A config.yaml as plain data (nothing in it is interpreted); None when there is none that can be read."""
    try:
        plain: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, OmegaConfBaseException, ValueError, YAMLError):
        return None
    return plain if isinstance(plain, dict) else None


def flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested data as dotted key -> value; lists are values."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


@dataclass(frozen=True)
class BatchOptions:
    effective: int | None = 48
    micro: Any = None  # a positive integer, null, or `auto`: the largest that fits

    def __post_init__(self) -> None:
        if self.effective is not None:
            positive("batch.effective", self.effective)
        if isinstance(self.micro, bool) or not (self.micro in (None, "auto") or isinstance(self.micro, int)):
            raise ConfigError("batch.micro", self.micro, "is neither a positive integer, null nor auto",
                              "set batch.micro=16, batch.micro=null or batch.micro=auto")  # fmt: skip
        if isinstance(self.micro, int):
            positive("batch.micro", self.micro)


@dataclass(frozen=True)
class SweepOptions:
    """What concerns the jobs of a sweep together.

    Args:
        tolerance: every job has to train what the first one does: largest relative distance of weights and losses
            (0: to the bit; null: do not ask). The sweep ends with exit code 1 when one does not.
        skip_unavailable: a job that this machine cannot run (too few devices, a precision it lacks) is listed as skipped
            with the reason, and does not make the sweep fail.
        dry_run: list the jobs with their plans and costs, and run none.
        parallel_jobs: how many at a time on this machine, each with its own GPUs and cores; on SLURM, of the array.
    """

    tolerance: float | None = None
    skip_unavailable: bool = False
    dry_run: bool = False
    parallel_jobs: int = 1

    def __post_init__(self) -> None:
        if self.tolerance is not None:
            within("sweep.tolerance", self.tolerance, 0, 1e6)
        positive("sweep.parallel_jobs", self.parallel_jobs)


@dataclass(frozen=True)
class Settings:
    """The top-level keys that are no group."""

    task: str = "train"
    seed: int = 0
    epochs: int | None = 15
    steps: int | None = None
    batch: Any = None  # BatchOptions, SweepOptions and CostOptions: built on their own, since OmegaConf cannot fill a
    sweep: Any = None  # frozen dataclass inside another one
    cost: Any = None
    max_grad_norm: float | None = None
    log_every: int = 10
    eval_every: int | None = None
    log_weights: int = 0
    warmup: int = 0
    resume: str | None = None
    allow_contract_change: bool = False
    imports: list[str] = field(default_factory=list)
    deterministic: bool = False
    threads: int | None = None
    compile: Any = False
    channels_last: bool | None = None
    on_nonfinite: str = "stop"

    def __post_init__(self) -> None:
        choice("task", self.task, ("train", "evaluate", "export", "plan"))
        within("warmup", self.warmup, 0, 1e9)
        choice("compile", self.compile, model.COMPILE)
        choice("on_nonfinite", self.on_nonfinite, ("stop", "skip"))
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", self.seed, "is not in 0 .. 2^63-1", "set seed=0")
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError("steps", self.steps, f"exactly one of steps and epochs={self.epochs} has to be null",
                              f"set epochs=null steps={self.steps or 1000} or steps=null epochs=15")  # fmt: skip
        for key in ("epochs", "steps", "log_every", "eval_every", "threads", "max_grad_norm"):
            if getattr(self, key) is not None:
                positive(key, getattr(self, key))
        if self.threads is not None and self.threads > 4096:
            raise ConfigError("threads", self.threads, "is more than any machine has", "set threads=null")
        if self.task in ("evaluate", "export") and self.resume is None:
            raise ConfigError("resume", None, f"task={self.task} needs a run to {self.task}", "set resume=<run folder>")


@dataclass(frozen=True)
class Config(Settings):
    """The whole tree. `plain` is the resolved data it was built from: what config.yaml, checkpoints and W&B get."""

    parallel: Any = None
    precision: Any = None
    sampler: Any = None
    accumulation: Any = None
    reduction: Any = None
    data: Any = None
    augment: Any = None
    model: Any = None
    loss: Any = None
    optimizer: Any = None
    scheduler: Any = None
    ema: Any = None
    checkpoint: Any = None
    logger: Any = None
    plain: dict[str, Any] = field(default_factory=dict)


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
    refuse_interpolations(plain, "")
    scalars = {key: value for key, value in plain.items() if key not in TABLES}
    batch = typed(BatchOptions, scalars.pop("batch", {}), "batch.")
    sweep = typed(SweepOptions, scalars.pop("sweep", {}), "sweep.")
    cost = typed(CostOptions, scalars.pop("cost", {}), "cost.")
    settings = typed(Settings, scalars, "")
    groups = {group: options(group, plain.get(group)) for group in TABLES}
    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(Settings)}
    config = Config(**{**values, **groups, "batch": batch, "sweep": sweep, "cost": cost, "plain": dict(plain)})
    check_together(config)
    return config


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
        raise ConfigError(f"{group}.name", name, f"no such {group}", f"choose one of {', '.join(near)}")
    return typed(table[name], node, group + ".")


def typed(cls: type, node: Mapping[str, Any], prefix: str) -> Any:
    """`cls` built from `node` with OmegaConf's conversions; its complaints become one line with the full key."""
    known = {f.name for f in dataclasses.fields(cls)}
    if not isinstance(node, Mapping):
        raise ConfigError(prefix.rstrip("."), node, "is a group of settings", f"set {prefix}{min(known)} and others in it")
    for key in node:
        if key not in known:
            what = f"{prefix[:-1]}={node['name']}" if "name" in node else prefix.rstrip(".") or "isobatch"
            raise ConfigError(prefix + str(key), node[key], f"{what} has no such option",
                              way_to_option(prefix, str(key), known - {"name"}, TABLES.get(prefix[:-1], {})))  # fmt: skip
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), dict(node)))
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        value: Any = node
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else value
        problem = complaint(str(error.msg or error).splitlines()[0])
        raise ConfigError(prefix + key, value, problem, "see the comments in conf/ for the values it takes") from None


def check_together(config: Config) -> None:
    """What no group can see alone."""
    micro = config.batch.micro if config.batch.micro != "auto" else None
    replicas = config.parallel.known_replicas
    if config.batch.micro != "auto":
        # without the number of replicas only what holds for every one of them can be checked yet; a resumed run keeps
        # the micro batch that it was cut with, and its accumulation follows
        known = replicas and config.resume is None
        resolve_batch(config.batch.effective, micro, config.accumulation.steps if known else None, replicas or 1)
    elif config.batch.effective is None:
        raise ConfigError("batch.effective", None, "batch.micro=auto needs an effective batch to divide",
                          "set batch.effective=48")  # fmt: skip
    config.parallel.check_with(config)
    if config.augment.name != "none" and config.data.kind != "images":
        raise ConfigError("augment.name", config.augment.name, f"data={config.data.name} are no images",
                          "set augment=none")  # fmt: skip


def check_inputs(config: Config) -> None:
    """What has to lie on this machine before anything starts (folders, files); not needed to read a config.

    Raises:
        ConfigError: it does not.
    """
    check = getattr(config.data, "check", None)
    if check is not None and config.task != "export":
        check()
