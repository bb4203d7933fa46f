"""What a sweep's command line needs before Hydra reads it."""

from __future__ import annotations

import re
from typing import Any

from isobatch.config import TABLES, conf_folder, read_conf

WORD = re.compile(r"(?P<sign>\+{0,2})(?P<key>[A-Za-z_][\w./]*)=(?P<value>.*)", re.DOTALL)
LAYERS = {"experiment", "plan", "resume"}  # each of them brings choices for any group
SEVERAL = re.compile(r".*,.*|(choice|range|glob|shuffle|sort)\(.*\)", re.DOTALL)


def reachable(words: list[str]) -> list[str]:
    """`words` with `++` before options that a swept choice has and the default one has not: `-m parallel=ddp,fsdp
    parallel.nproc=2`.

    Hydra composes a sweep once without what is swept and would look for the option in the default choice, here in vain.
    Whether the choice of a job has the option is checked when that job's config is loaded.
    """
    if not {"-m", "--multirun"} & set(words):
        return words
    found = [(word, WORD.fullmatch(word)) for word in words]
    several = {m["key"] for _, m in found if m and m["key"] in {*TABLES, *LAYERS} and SEVERAL.fullmatch(m["value"])}
    swept = set(TABLES) if several & LAYERS else several
    known = {group: options_of_default(group) for group in swept}

    def reached(word: str, match: re.Match[str] | None) -> str:
        group, *option = match["key"].split(".") if match and not match["sign"] else ("",)
        return f"++{word}" if option and group in swept and option[0] not in known[group] else word

    return [reached(*both) for both in found]


def options_of_default(group: str) -> set[str]:
    """Names of the options that the choice in conf/config.yaml has."""
    entries: list[Any] = read_conf("config.yaml")["defaults"]
    choice = next((entry[group] for entry in entries if isinstance(entry, dict) and group in entry), None)
    name = f"{group}/{choice}.yaml"
    return set(read_conf(name) or ()) if (conf_folder() / name).exists() else set()
