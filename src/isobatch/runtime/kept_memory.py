"""Main memory that a training on a CPU frees and needs again stays with its process.

glibc gives a freed block of megabytes back to the kernel, and a step's gradients and activations come back page by page, each
one a fault and a zeroing. Its limits grow by themselves, but only to the largest block that was ever freed. They are a
process's own: what it starts anew has the usual ones.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's numbers for them (malloc.h)
LARGEST = 32 * 2**20  # bytes: the most that glibc takes; larger blocks are mapped, and given back, one by one
NEVER = 2**31 - 1
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "LD_PRELOAD")


def keep(environ: Mapping[str, str] = os.environ) -> bool:
    """From now on; returns whether it is so. What a person has set, stays, and so does another allocator.

    Both limits: to set one of them is to end the growth of the other.
    """
    libc = glibc()
    if libc is None or set(SETTINGS) & set(environ) or "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return False
    return bool(libc.mallopt(MMAP_THRESHOLD, LARGEST)) and bool(libc.mallopt(TRIM_THRESHOLD, NEVER))


def give_back() -> None:
    """What is free now, once: what was kept for something else, the job before in this process, say."""
    if (libc := glibc()) is not None:
        libc.malloc_trim(0)


def glibc() -> ctypes.CDLL | None:
    """None where the C library is another one; musl's mallopt does nothing."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt") else None
