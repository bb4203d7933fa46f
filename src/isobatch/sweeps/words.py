"""What a sweep's command line needs before Hydra reads it."""

from __future__ import annotations

import re

from isobatch.config import TABLES
from isobatch.resume_words import WORD

SEVERAL = re.compile(r".*,.*|(choice|range|glob|shuffle|sort)\(.*\)", re.DOTALL)


def reachable(words: list[str]) -> list[str]:
    """`words` with `++` before options of a group whose choice is swept: `-m parallel=ddp,fsdp parallel.nproc=2`.

    Hydra composes a sweep once without what is swept and would look for the option in the default choice, here in vain.
    Whether the choice of a job has the option is checked when that job's config is loaded.
    """
    if not {"-m", "--multirun"} & set(words):
        return words
    found = [(word, WORD.fullmatch(word)) for word in words]
    swept = {m["key"] for _, m in found if m and m["key"] in TABLES and SEVERAL.fullmatch(m["value"])}
    return [f"++{word}" if m and not m["sign"] and "." in m["key"] and m["key"].split(".")[0] in swept else word
            for word, m in found]  # fmt: skip
