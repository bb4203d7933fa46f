"""Datasets that live in memory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import numpy
import pytest
from sklearn.datasets import load_digits

from isobatch.config import options
from isobatch.data.in_memory import read_digits
from isobatch.errors import ConfigError


def test_digits_are_those_that_scikit_learn_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = load_digits()
    rows = read_digits()
    assert (rows[:, :-1] == raw.data).all() and (rows[:, -1] == raw.target).all()
    # a scikit-learn that keeps the file elsewhere
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin="/nowhere/sklearn/__init__.py"))
    assert numpy.array_equal(read_digits.__wrapped__(), rows)


@pytest.mark.slow  # a process of its own
def test_digits_are_read_without_importing_scikit_learn() -> None:
    code = "import sys; from isobatch.data.in_memory import Digits; Digits().load(None, 0); assert 'sklearn' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("values", [{"size": 2**31 - 1}, {"matrix_seed": 10**23}, {"matrix_seed": -1}])
def test_a_matrix_that_cannot_be_drawn_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{next(iter(values))}="):
        options("data", {"name": "random_matrix", **values})
