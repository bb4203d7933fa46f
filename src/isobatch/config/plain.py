"""Configs as plain data: from Hydra's tree, from a file, as YAML. Of the keys only those that are paths are known here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from isobatch.config import marked
from isobatch.errors import ConfigError
from isobatch.logger import SCHEME
from isobatch.run_folder.reading import read_yaml


def conf_folder() -> Path:
    """conf/ of the installed wheel, or of the repository that this file sits in."""
    packaged = Path(__file__).parents[1] / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "conf"


def resolved(composed: Any) -> dict[str, Any]:
    """Hydra's composed config as plain data: interpolations resolved, nothing missing."""
    plain: dict[str, Any] = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore
    return plain


def to_yaml(plain: Mapping[str, Any]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(dict(plain)))


def read_conf(name: str) -> Any:
    """conf/`name` as plain data, as it is written there."""
    return read_yaml(conf_folder(), name)


def flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested data as dotted key -> value; lists are values."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def plain_config(composed: Any, cwd: Path, words: Sequence[str] = ()) -> dict[str, Any]:
    """Hydra's composed config to plain data, with input paths made absolute against `cwd`.

    Args:
        words: the settings that were typed for this job.
    Raises:
        ConfigError: a value that is missing, or refers to one that is not there; a micro batch that may be a slip.
    """
    try:
        plain = resolved(composed)
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        raise ConfigError(key, "???" if "Missing" in type(error).__name__ else "${...}", str(error).splitlines()[0],
                          f"set {key}=... on the command line") from None  # fmt: skip
    for dotted, kind in marked.paths().items():  # a person types them where he is; hydra.job.chdir must not move them
        *groups, key = dotted.split(".")
        node: Any = plain
        for group in groups:
            node = node.get(group) if isinstance(node, dict) else None  # a text in a group's place is refused later
        if isinstance(node, dict) and isinstance(node.get(key), str) and node[key]:
            if node[key].startswith(SCHEME):
                from isobatch.logger import artifacts

                node[key] = artifacts.local(dotted, node[key], cwd)
            try:
                path = (cwd / Path(node[key]).expanduser()).resolve()
                there = path.exists()  # raises for what no file system takes, as for a name that is too long
            except (OSError, RuntimeError, ValueError) as error:
                problem = getattr(error, "strerror", None) or str(error)
                raise ConfigError(dotted, node[key][:60], f"is no path: {problem}", f"set {dotted} to a path") from None
            if there or kind == "file":
                node[key] = str(path)
    refuse_slip({word.split("=")[0].lstrip("+") for word in words}, plain.get("batch"))
    return plain


def refuse_slip(typed: set[str], batch: Any) -> None:
    """Raise ConfigError for a micro batch that was typed without a shard and is no multiple of the shard that stands.

    Whether the person means the memory or the training cannot be told. With a typed shard it is the memory: the micro
    batch is then rounded down (batch_plan.resolve_batch), and the plan says so.
    """
    if not isinstance(batch, dict) or "batch.micro" not in typed or "batch.shard" in typed:
        return
    micro, shard = batch.get("micro"), batch.get("shard")
    if type(micro) is int and type(shard) is int and 0 < shard < micro and micro % shard:
        near = f"{micro // shard * shard} or {-(-micro // shard) * shard}"
        raise ConfigError("batch.micro", micro, f"is no multiple of the shard, batch.shard={shard}",
                          f"set batch.micro={near} (the same training), or batch.shard=null (a shard is then as large as the "
                          "micro batch: another training for batch norm and all that draws)")  # fmt: skip
