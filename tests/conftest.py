"""What every test needs: this folder importable, one torch thread, nothing written into the repository."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until the tests are collected: a sixth of the imports' time
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C, and what it starts too


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
