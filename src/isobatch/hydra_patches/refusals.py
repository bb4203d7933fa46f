"""What Hydra refuses, in one line that names key, value and a way out. Exit code 1, as everything that Hydra refuses."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from isobatch.checks import way_to_option
from isobatch.config import TABLES, conf_folder, flat, read_conf
from isobatch.errors import ConfigError
from isobatch.hydra_patches import layers
from isobatch.runtime import garbage

_load = ConfigLoaderImpl.load_configuration
NAMED = re.compile(r"Could not (?:find|load|override) '([^']+)'")
WORD = re.compile(r"[+~]{0,2}([^=]*)=?(.*)", re.DOTALL)


class Refusal(SystemExit):
    """Not an Exception, so that Hydra adds nothing of its own: the command prints the line and ends with code 1."""


def refused(key: str, value: object, problem: str, way_out: str) -> Refusal:
    return Refusal(f"isobatch: {ConfigError(key, value, problem, way_out)}")


def load_configuration(self: Any, config_name: str | None, overrides: list[str], run_mode: RunMode, *args: Any,
                       **kwargs: Any) -> DictConfig:  # fmt: skip
    """In place of ConfigLoaderImpl's: remembers what is typed for the layers, and rewords what Hydra refuses.

    Raises:
        Refusal: in place of Hydra's own, unless HYDRA_FULL_ERROR=1 asks for its stack.
    """
    self._typed = {m[1]: m[2] for word in overrides if not word.startswith("~") and (m := WORD.fullmatch(word))}
    garbage.composed()
    try:
        return _load(self, config_name, overrides, run_mode, *args, **kwargs)
    except ConfigError as error:
        raise Refusal(f"isobatch: {error}") from error
    except (HydraException, ValueError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        raise reworded(error, overrides) from error


@contextmanager
def one_line() -> Iterator[None]:
    """What Hydra stumbles over outside of a job (its own settings, the folder) is one line too, and code 2."""
    try:
        yield
    except (OmegaConfBaseException, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        print(f"isobatch: {stumble(error)}", file=sys.stderr, flush=True)
        raise SystemExit(ConfigError.exit_code) from None


def stumble(error: Exception) -> ConfigError:
    """The line for what keeps a job from beginning."""
    if isinstance(error, OSError):
        return ConfigError("hydra.run.dir", error.filename, f"cannot be made or written ({error.strerror})",
                           "set hydra.run.dir (hydra.sweep.dir and hydra.sweep.subdir) to a folder that can")  # fmt: skip
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else None
    if cause is not None:
        return stumble(cause)
    key = str(getattr(error, "full_key", None) or "a setting")
    return ConfigError(key, "${...}", str(error).splitlines()[0], f"set {key}=... on the command line")


_run, _multirun = Hydra.run, Hydra.multirun


def run(self: Any, *args: Any, **kwargs: Any) -> Any:
    with one_line():
        return _run(self, *args, **kwargs)


def multirun(self: Any, *args: Any, **kwargs: Any) -> Any:
    with one_line():
        return _multirun(self, *args, **kwargs)


def apply_overrides(overrides: list[Override], cfg: DictConfig) -> None:
    """In place of ConfigLoaderImpl._apply_overrides_to_config: one at a time, so that the one that fails is known."""
    for override in overrides:
        try:
            layers._apply([override], cfg)
        except ConfigCompositionException as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            raise of_override(override, cfg, error) from error
    layers.length_of_typed(overrides, cfg)


def of_override(override: Override, cfg: DictConfig, error: Exception) -> Refusal:
    """The line for a setting that cannot be set."""
    key, line = override.key_or_group, str(override.input_line)
    value = line.partition("=")[2]
    said = str(error)
    if "Could not append" in said:
        return refused(f"+{key}", value, "is there already", f"write {line.lstrip('+')}")
    if override.is_delete():
        return Refusal(f"isobatch: {line}: there is nothing to take away; {did_you_mean(nearest(key, cfg), '~')}")
    if not ("Could not override" in said or "does not exist" in said):
        cause = " ".join(str(error.__cause__ or error).split())
        return refused(key, value, cause, "see the comments in conf/ for the values it takes")
    root, _, option = key.partition(".")
    node: Any = OmegaConf.to_container(cfg, resolve=False)
    holder = key.rpartition(".")[0]
    for open_one, way in ((key, f"+{key}.<name>=<value> for each of them"), (holder, f"+{line}")):
        if open_one.endswith(".kwargs") and OmegaConf.select(cfg, open_one, throw_on_resolution_failure=False) is not None:
            return refused(key, value, f"{open_one} takes entries that are not there yet with a plus sign", f"write {way}")
    if root in TABLES and option and isinstance(node.get(root), Mapping):
        name = str(node[root].get("name"))
        what = f"{root}={name} has no such option"
        if name not in TABLES[root] and "kwargs" in node[root]:  # registered by a module that is not imported yet
            return refused(key, value, what, f"hand it to your own {root} with +{root}.kwargs.{option}={value}")
        if "." not in option:
            return refused(key, value, what, way_to_option(f"{root}.", option, set(node[root]) - {"name"}, choices(root)))
    return refused(key, value, "no such setting", did_you_mean(nearest(key, cfg)))


def nearest(key: str, cfg: DictConfig) -> str:
    """The setting, group or choice that `key` may have meant."""
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    hydra = plain.pop("hydra", {})
    known = [*flat({"hydra": hydra})] if key.startswith("hydra") else [*TABLES, *layers.OVERLAYS, *plain, *flat(plain)]
    leaf = key.rpartition(".")[2]
    same = [name for name in known if name.rpartition(".")[2] == leaf]  # lr=0.1: the option without its group
    near = difflib.get_close_matches(key, known, n=1) or same or [
        name for name in known if difflib.SequenceMatcher(None, leaf, name.rpartition(".")[2]).ratio() > 0.8
    ]  # fmt: skip
    return near[0] if near else ""


def did_you_mean(key: str, sign: str = "") -> str:
    return f"did you mean {sign}{key}" if key else "--cfg job shows all settings"


def choices(group: str) -> dict[str, type]:
    """Choice of conf/ -> the class of its options."""
    files = sorted((conf_folder() / group).glob("*.yaml"))
    names = {file.stem: (read_conf(f"{group}/{file.name}") or {}).get("name") for file in files}
    return {choice: TABLES[group][name] for choice, name in names.items() if name in TABLES[group]}


def reworded(error: Exception, overrides: Sequence[str]) -> Refusal:
    """The line for whatever Hydra refuses before settings are set."""
    said = " ".join(str(error).partition("\nSee https://")[0].split())
    if isinstance(error, MissingConfigException):
        return of_choice(error)
    if isinstance(error, OverrideParseException):
        word = error.override or said
        match = WORD.fullmatch(word)
        if match is None or "=" not in word:
            return Refusal(f"isobatch: {word}: is no setting, which is key=value; write {word}=...")
        quoted = match[2].replace("\\", "\\\\").replace('"', '\\"')
        return refused(match[1], match[2], "Hydra cannot read it", f"quote the value: '{match[1]}=\"{quoted}\"'")
    ambiguous = re.search(r"Ambiguous value for argument '([^=]*)=(.*?)'\s*1\.", said)
    if ambiguous:
        return refused(ambiguous[1], ambiguous[2], "is several values",
                       f"add -m to run a job for each, or write {ambiguous[1]}=[{ambiguous[2]}] for a list")  # fmt: skip
    sweep = re.search(r"'([^=']*)=(.*)'", said)
    if sweep and "multirun" in said:
        return refused(sweep[1], sweep[2], "is several values", "add -m to run a job for each")
    if sweep and "Sweeping over Hydra" in said:
        return refused(sweep[1], sweep[2], "Hydra's own settings cannot be swept", "give one value")
    if "must be a string or a list" in said:
        word = next((word for word in overrides if word.partition("=")[0].lstrip("+") in TABLES and not_text(word)), "")
        key, _, value = word.partition("=")
        return refused(key or "group", value, "is a group, whose choices are names", "--help lists them")
    twice = re.search(r"Multiple values for (\S+?)\. .*: (\S+)'", said)
    if twice:
        return refused(f"+{twice[1]}", twice[2], "the group is there already", f"write {twice[1]}={twice[2]}")
    named = NAMED.search(said)
    cause = f" ({' '.join(str(error.__cause__).split())})" if error.__cause__ else ""
    return Refusal(f"isobatch: {named[1] + ': ' if named else ''}{said}{cause}")


def not_text(word: str) -> bool:
    return re.fullmatch(r"null|true|false|[-+.0-9e]+", word.partition("=")[2]) is not None


def of_choice(error: MissingConfigException) -> Refusal:
    """The line for a choice that no folder has."""
    group, _, choice = str(error.missing_cfg_file).rpartition("/")
    origin = re.match(r"In '([^']+)'", str(error))
    where = f" (named in {origin[1]}.yaml)" if origin and origin[1] not in ("config", "hydra/config") else ""
    options = list(error.options or ()) or [file.stem for file in (conf_folder() / group).glob("*.yaml")]
    if not group:
        return refused("--config-name", choice, "no such file in conf/", "leave it out")
    near = difflib.get_close_matches(choice, options, n=3, cutoff=0.5)
    way = f"did you mean {', '.join(near)}" if near else f"choose one of {', '.join(sorted(options))}" if options else (
        f"put {choice}.yaml into the folder {group}/ of your --config-dir")  # fmt: skip
    return refused(group, choice, f"no such choice{where}", way)
