"""All benchmarks in one table, each figure beside what it is compared with: `make bench`, under a quarter of an hour.

    python benchmarks                 # all of them, each row as soon as it is measured
    python benchmarks loop data       # some; --list names them

Every figure is a median over interleaved rounds, relative to something measured in the same processes (see the files). What the
defaults owe to them is in docs/performance.md.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import time
from collections.abc import Iterator
from typing import NamedTuple

NAMES = ("loop", "shards", "lanes", "reduction", "data", "runs")


class Row(NamedTuple):
    """A line of the table; every benchmark has `rows()`, which yields (what, figure, compared with)."""

    what: str
    figure: str
    against: str


def rows(name: str) -> Iterator[Row]:
    for row in importlib.import_module(name).rows():
        yield Row(*row)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--list", action="store_true", help="name them and stop")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in NAMES]:
        parser.error(f"{unknown[0]} is none of {', '.join(NAMES)}")
    if given.list:
        print("\n".join(NAMES))
        return
    import torch

    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores")
    print(f"{'what':<56} {'figure':>16}   compared with")
    began = time.perf_counter()
    for name in given.names or NAMES:
        for row in rows(name):
            print(f"{row.what:<56} {row.figure:>16}   {row.against}", flush=True)
    print(f"measured in {time.perf_counter() - began:.0f} s")
