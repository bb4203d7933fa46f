"""`wandb-artifact://ENTITY/PROJECT/NAME:VERSION` in place of a path: downloaded once, and from then on a folder like any other.

What comes out of it is checked by whoever reads it, as every file that others may have made.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isobatch.errors import ConfigError
from isobatch.logger import access
from isobatch.logger.protocol import SCHEME
from isobatch.run_folder import layout

log = logging.getLogger("isobatch")

OF_THE_RUN = (layout.CONFIG, layout.PLAN)  # beside the files of a checkpoint
FOLDER = "artifacts"  # below the working folder
LABEL = "artifact.json"  # in the folder: which one it is
PART = r"[\w.-]+"
ADDRESS = re.compile(rf"{SCHEME}(?P<name>(?P<where>{PART}/{PART}/{PART}):(?P<version>[\w.-]+))(?P<inside>/.*)?", re.ASCII)
IN_A_WORD = re.compile(rf"{SCHEME}[^,'\"\]]+")
NAME = re.compile(rf"{PART}/{PART}/{PART}:[\w.-]+", re.ASCII)
PROBE_S = 5.0


def fetched(words: Sequence[str], cwd: Path) -> list[str]:
    """`words` of a command line with a folder in place of an artifact that `resume` names: it has to be there before Hydra
    composes, since a run brings its settings along.

    Raises:
        ConfigError: it cannot be had.
    """
    return [IN_A_WORD.sub(lambda found: str(Path(local("resume", found[0], cwd)).relative_to(cwd)), word)
            if word.startswith("resume=") else word for word in words]  # fmt: skip


def local(key: str, address: str, cwd: Path) -> str:
    """The folder, or the file in it, that the setting `key` means by `address`; downloaded below `cwd` if it is not there.

    Raises:
        ConfigError: no such artifact, no key, no server.
    """
    match = ADDRESS.fullmatch(address)
    if match is None or any(set(part) <= {"."} for part in re.split("[/:]", address.removeprefix(SCHEME)) if part):
        raise ConfigError(key, address, "is no address of an artifact", f"write {key}={SCHEME}ENTITY/PROJECT/NAME:VERSION")
    folder = cwd / FOLDER / match["where"] / match["version"]
    if not (re.fullmatch(r"v\d+", match["version"]) and folder.is_dir()):  # another alias may have moved on
        folder = cwd / FOLDER / match["where"] / _download(key, address, match["name"], cwd / FOLDER / match["where"])
    return str(folder) + (match["inside"] or "").rstrip("/")


def _download(key: str, address: str, name: str, parent: Path) -> str:
    """Into `parent`/vN; returns vN. In a process of its own: wandb starts threads and another program."""
    from isobatch.logger.wandb_process import answers

    found = access.resolve("online")
    if access.find_key() is None:
        raise _refusal(key, address, "no W&B key was found", "set WANDB_API_KEY or run `wandb login`")
    if not answers(found.base_url, PROBE_S):
        raise _refusal(key, address, f"{found.base_url} does not answer", "check the network and WANDB_BASE_URL")
    log.info("W&B: fetching %s", name)
    command = [sys.executable, "-P", str(Path(__file__).with_name("wandb_download.py")), name, str(parent),
               layout.CHECKPOINTS, *OF_THE_RUN]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          encoding="utf-8", errors="replace")  # fmt: skip
    last = (done.stdout.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    try:
        answer = json.loads(last)
    except ValueError:
        answer = {"error": last}
    if not isinstance(answer, dict) or "version" not in answer:
        problem = answer.get("error", last) if isinstance(answer, dict) else last
        raise _refusal(key, address, f"cannot be fetched ({access.redacted(str(problem))[:200]})",
                       "name an artifact that `wandb artifact get` finds")  # fmt: skip
    return str(answer["version"])


def used(plain: Mapping[str, Any]) -> dict[str, str]:
    """Setting -> artifact, of all that was downloaded for a run with the settings `plain`, or for an earlier one."""
    found: dict[str, str] = {}
    for key, text in _texts(plain, ""):
        path = Path(text)
        for folder in (path, *list(path.parents)[:4]) if path.is_absolute() else ():
            if (name := _label(folder / LABEL)) is not None:
                found[key] = name
                break
    return found


def _label(file: Path) -> str | None:
    try:
        if not file.is_file() or file.stat().st_size > 4096:
            return None
        name = json.loads(file.read_text(encoding="utf-8"))["artifact"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) and NAME.fullmatch(name) else None


def _texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, str):
        yield key, node


def _refusal(key: str, address: str, problem: str, way_out: str) -> ConfigError:
    return ConfigError(key, address, problem, f"{way_out}, or set {key} to a folder")
