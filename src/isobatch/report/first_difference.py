"""Where to look when two plans part: the first module whose output differs for the same shard (run_folder/fingerprint.py)."""

from __future__ import annotations

from pathlib import Path

from isobatch.run_folder.reading import Unreadable, read_json

SIZE, ENTRIES = 16 << 20, 1_000_000  # of a file with a digest per module and shard


def first_difference(first: Path, other: Path) -> str:
    """One sentence from the fingerprint.json of two run folders; empty when there is nothing to compare."""
    try:
        here, there = (read_json(run, "fingerprint.json", SIZE, ENTRIES) for run in (first, other))
        shards = [key for key in here if key.startswith("0/") and key in there]
        for key in shards:
            for (name, mine), (other_name, theirs) in zip(here[key], there[key], strict=False):
                if (name, mine) != (other_name, theirs):
                    return _sentence(name, key.removeprefix("0/"))
    except (Unreadable, AttributeError, TypeError, ValueError):  # damaged, or of another form
        return ""
    if not shards:
        return ""
    return (
        "step 0 computes the same outputs for the same shards, so look at the backward and the update: kernels that are "
        "not deterministic (deterministic=true), or a loss that mixes samples"
    )


def _sentence(name: str, shard: str) -> str:
    if name == "input":
        return (
            f"shard {shard} of step 0 has other inputs: a dataset that draws from a generator of its own, or from state "
            "that it keeps between samples"
        )
    return (
        f"the first module that differs for shard {shard} of step 0 is {name}: it mixes samples of several shards, keeps "
        "state between calls, draws from a generator of its own, or its kernel is not deterministic"
    )
