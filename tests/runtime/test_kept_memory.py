"""Memory that is freed and needed again: counted in page faults, in a process of its own."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from harness import plain

from isobatch.config import load
from isobatch.run import Run
from isobatch.runtime import kept_memory
from isobatch.runtime.distributed import Ranks

FAULTS = """
import ctypes, resource, sys
from isobatch.runtime import kept_memory
if "keep" in sys.argv:
    assert kept_memory.keep({})
libc = ctypes.CDLL(None)
libc.prctl(41, 1, 0, 0, 0)  # no huge pages: a fault is one of a page
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def twice():
    held = [libc.malloc(20 << 20) for _ in range(2)]  # what a step holds at a time
    for block in held:
        ctypes.memset(block, 1, 20 << 20)
    for block in held:
        libc.free(block)
twice()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    twice()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*words: str) -> int:
    clean = {k: v for k, v in os.environ.items() if k not in (*kept_memory.SETTINGS, "GLIBC_TUNABLES")}
    done = subprocess.run([sys.executable, "-c", FAULTS, *words], capture_output=True, text=True, check=True, env=clean)
    return int(done.stdout)


@pytest.mark.skipif(not kept_memory.glibc(), reason="glibc alone")
def test_what_is_freed_and_needed_again_is_not_faulted_in_anew() -> None:
    pages = 2 * (20 << 20) // resource.getpagesize()
    assert faults("keep") < pages / 10 < pages < faults()


def test_what_a_person_has_set_stays() -> None:
    assert not kept_memory.keep({"MALLOC_TRIM_THRESHOLD_": "0"})
    assert not kept_memory.keep({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})
    assert not kept_memory.keep({"LD_PRELOAD": "libjemalloc.so"})


def test_a_training_on_a_cpu_keeps_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(kept_memory, "keep", lambda: calls.append(True))
    words = ["data=synthetic", "data.samples=8", "data.eval_samples=2", "model=mlp", "batch.effective=4", "logger=none"]
    run = Run(load(plain(*words, "device=cpu")), tmp_path, Ranks())
    run.build()
    run.files.close()
    assert calls == [True]
