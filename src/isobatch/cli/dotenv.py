"""`.env` in the working folder: variables for this command that the environment does not have yet (keys, folders of data)."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from pathlib import Path

LARGEST = 1 << 16
LINE = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>\"[^\"]*\"|'[^']*'|[^\s#]*)\s*(?:#.*)?", re.ASCII)
# what decides which programs and libraries run: a file that came along with a folder has no say in that
NEVER = re.compile(r"(LD_|DYLD_|PYTHON|TORCH|GIT_|BASH).*|PATH|HOME|SHELL|IFS|ENV")


def read(folder: Path, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Put them into `environ`; returns a line for each that is not taken."""
    file = folder / ".env"
    try:
        if not file.is_file() or file.stat().st_size > LARGEST:
            return []
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError):
        return []
    told = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = LINE.fullmatch(text)
        if match is None:
            told.append(f".env: line {number} is not NAME=value")
        elif NEVER.fullmatch(match["name"]):
            told.append(f".env: {match['name']} is not taken from there; set it in your shell")
        else:
            value = match["value"]
            environ.setdefault(match["name"], value[1:-1] if value[:1] in "\"'" and value else value)
    return told
