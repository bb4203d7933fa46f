"""Which tests train, fork ranks or start programs: seen from what they call, so that nobody keeps a list.

`pytest -m "not trains"` is the unit tests, seconds for a room; `-m trains` the others.
"""

from __future__ import annotations

import dis
import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

import isobatch
from isobatch import run

TESTS = str(Path(__file__).parent)
HEAVY = (subprocess, multiprocessing, run, run.run_job, run.Run, os.fork)
IMPORTED = {"subprocess", "multiprocessing", "isobatch.run"}


def mark(items: list[pytest.Item]) -> None:
    """`trains` on each test that does, itself, through a fixture or through a function of the tests."""
    known: dict[Any, bool] = {}
    for item in items:
        fixtures = getattr(item, "_fixtureinfo", None)
        used = [found[-1].func for found in (fixtures.name2fixturedefs.values() if fixtures else ())]
        if any(trains(function, known) for function in (getattr(item, "function", None), *used)):
            item.add_marker("trains")


def trains(function: Any, known: dict[Any, bool]) -> bool:
    """Whether `function` comes to a training, a process or a program, over functions of the tests."""
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType) or not function.__code__.co_filename.startswith(TESTS):
        return False
    if function not in known:
        known[function] = False  # a function that calls itself
        known[function] = any(_heavy(value, known) for value in _reached(function.__code__, function.__globals__))
    return known[function]


def _heavy(value: Any, known: dict[Any, bool]) -> bool:
    if isinstance(value, FunctionType | ModuleType | type) and any(value is one for one in HEAVY):
        return True
    if isinstance(value, ModuleType):  # launching.run, warm.run: all of such a module's functions are for it
        return Path(getattr(value, "__file__", None) or "").name in ("launching.py", "chaos.py")
    return trains(value, known)


def _reached(code: CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """What stands behind the global names in `code`, in functions inside of it too."""
    before: Any = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            before = names.get(step.argval)
            yield before
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            if before is isobatch and step.argval == "train":
                yield run
            elif isinstance(before, ModuleType):
                yield getattr(before, step.argval, None)
            before = None
        elif step.opname == "IMPORT_NAME" and step.argval in IMPORTED:
            yield run
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _reached(constant, names)
