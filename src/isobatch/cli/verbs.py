"""`isobatch VERB ...`: the commands beside training; each is also a module of its own (`python -m isobatch.report`)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from isobatch.runtime import garbage

VERBS = {
    "certify": "isobatch.certify",
    "compare": "isobatch.compare.__main__",
    "dashboard": "isobatch.dashboard",
    "doctor": "isobatch.doctor",
    "report": "isobatch.report.__main__",
}


def run_verb(words: Sequence[str]) -> int | None:
    """The exit code of the verb that `words` begin with, or of `--version`; None if they are a training's."""
    if list(words) == ["--version"]:
        from isobatch import __version__

        print(f"isobatch {__version__}")
        return 0
    if not words or words[0] not in VERBS:
        return None
    main = importlib.import_module(VERBS[words[0]]).main
    garbage.on()
    code: int | None = main(list(words[1:]))
    return code or 0
