"""What every test needs: this folder importable, one torch thread, nothing written into the repository."""

from __future__ import annotations

import functools
import gc
import importlib
import locale
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pretended import Machine

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import numpy
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("isobatch.runtime.cores.LEAST_S", math.inf)  # the plan says that a machine is busy: not in tests
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)  # no test depends on what was drawn before it
    yield
    torch.set_num_threads(1)  # a training sets what its config says, and the next test may look at a tensor alone
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module", autouse=True)
def _searched_once() -> None:
    """What lives on from the files before is not searched again by whoever looks for garbage."""
    gc.collect()
    gc.freeze()


STATE = pytest.StashKey[dict[str, Any]]()


def _state() -> dict[str, Any]:
    """What belongs to the whole process, and no test may leave changed: the next test would find it so, in some order."""
    import torch
    from omegaconf import OmegaConf

    stop = sys.modules.get("isobatch.launch.signals")
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return {
        "sys.modules['__main__']": sys.modules.get("__main__"), "torch's default dtype": torch.get_default_dtype(),
        "torch's gradients": torch.is_grad_enabled(), "gc": gc.isenabled(),
        "a requested stop": stop.STOP.requested if stop else 0,
        "Hydra's patches": OmegaConf.has_resolver("stamp"), **{s.name: signal.getsignal(s) for s in signals},
    }  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    item.stash[STATE] = _state()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item):
    result, before = (yield), item.stash[STATE]
    changed = [f"{name}: {before[name]!r} -> {value!r}" for name, value in _state().items() if value != before[name]]
    assert not changed, f"the test left {'; '.join(changed)}"
    return result


OPTIONAL = ("trackio", "mlflow")  # packages that `.[test]` leaves out: see pyproject.toml


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    return _not_for_want_of_a_package((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    return _not_for_want_of_a_package((yield))


def _not_for_want_of_a_package(report):
    """A test that is skipped because a package is not there would never be missed: that is an error of the set-up."""
    reason = str(report.longrepr[2]) if report.skipped and isinstance(report.longrepr, tuple) else ""
    missing = "could not import" in reason or "pip install" in reason
    if missing and not any(repr(name) in reason for name in OPTIONAL):
        report.outcome, report.longrepr = "failed", f"{reason}: pip install -e '.[test]' -c constraints.txt"
    return report


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        import warm

        return warm.share()  # the process that hands out the tests runs none
    for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if (
            signal.getsignal(number) is signal.SIG_IGN
        ):  # under nohup, or behind a shell's &: what tests start would ignore it too
            signal.signal(number, usual)
    gc.disable()  # until the tests are collected: a sixth of the imports' time
    import torch

    torch.set_num_threads(1)
    with suppress(locale.Error):  # what tests read and write is UTF-8, wherever they run
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C, and what it starts too


def pytest_collection_finish(session: pytest.Session) -> None:
    importlib.import_module("torch._dynamo")  # every optimizer imports it
    gc.freeze()  # a million objects of what is imported by now: searching them is a third of a second, here and in each rank
    gc.enable()


@pytest.fixture
def tables_as_before() -> Iterator[None]:
    """For tests that register parts of their own: no other test finds them."""
    from isobatch.config import TABLES

    before = {group: dict(table) for group, table in TABLES.items()}
    yield
    for group, table in TABLES.items():
        table.clear()
        table.update(before[group])


@pytest.fixture
def matrix_drawn() -> None:
    """The confusion matrix of an evaluation is drawn."""


@pytest.fixture(autouse=True)
def _no_matrix(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing it takes as long as the rest of a small evaluation twice; a test that looks at it asks for it."""
    if "matrix_drawn" not in request.fixturenames:
        monkeypatch.setattr("isobatch.evaluate.files.draw", lambda path, names, matrix: path.write_bytes(b""))


@pytest.fixture
def warm_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process beside the trainer has imported wandb already, which is most of its CPU time."""
    import warm

    from isobatch.logger import weights_and_biases

    popen = functools.partial(warm.Popen, preload=("wandb",))
    monkeypatch.setattr(weights_and_biases, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine with pretended GPUs (see pretended/): one, or as many as `@pytest.mark.gpu_pretended(3)` says.

    The test fails if anything was done that goes wrong on some days on a real device (`gpu.faults`).
    """
    from pretended import strictly

    asked = request.node.get_closest_marker("gpu_pretended")
    with strictly(*(asked.args if asked else ()), **(asked.kwargs if asked else {})) as machine:
        yield machine


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "trains" in config.option.markexpr:
        import trainings

        trainings.mark(items)
    for item in items:
        if "gpu" in getattr(item, "fixturenames", ()) and item.get_closest_marker("gpu_pretended") is None:
            item.add_marker("gpu_pretended")
