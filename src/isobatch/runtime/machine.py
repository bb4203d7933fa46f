"""What of a machine and its libraries decides bits: the same arithmetic, done by other kernels, rounds otherwise."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from isobatch.runtime import accelerator

# what makes torch, oneDNN and MKL choose other kernels than the processor's best
CAPS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE",
        "DNNL_DEFAULT_FPMATH_MODE", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE")  # fmt: skip
GPU_CAPS = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def facts(device: torch.device) -> dict[str, Any]:
    """Plain data, a text each; a key is there only where it says something of `device`."""
    found: dict[str, Any] = {"torch": torch.__version__, "device": accelerator.model_name(device)}
    if device.type == "cpu":
        found |= {"cpu": cpu(), "libraries": libraries(), "kernel_limits": environment(CAPS)}
    elif device.type == "cuda":
        runtime = torch.version.hip or torch.version.cuda
        found |= {"cuda": str(runtime), "cudnn": str(torch.backends.cudnn.version()), "kernel_limits": environment(GPU_CAPS)}
    return found


def environment(names: tuple[str, ...]) -> str:
    """Those of the variables that are set, as they would be typed; empty = none."""
    return " ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))


def cpu(proc: Path = Path("/proc/cpuinfo"), caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> str:
    """The processor's model and caches: kernels block their sums by the sizes of those."""
    try:
        text = proc.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^(?:model name|Processor|cpu)\s*:\s*(.+)$", text, re.MULTILINE)
    parts = [match[1].strip() if match else platform.processor() or platform.machine()]
    for index in sorted(caches.glob("index[0-9]*")):
        try:
            level, kind, size = ((index / name).read_text(encoding="utf-8").strip() for name in ("level", "type", "size"))
        except (OSError, ValueError):
            continue
        if kind != "Instruction":
            parts.append(f"L{level} {size}")
    return ", ".join(parts)


def libraries() -> str:
    """The versions of MKL and oneDNN that torch was built with."""
    text = torch.__config__.show()
    found = [re.search(pattern, text) for pattern in (r"Math Kernel Library Version (\S+)", r"MKL-DNN v(\S+)")]
    return ", ".join(f"{name} {match[1]}" for name, match in zip(("mkl", "onednn"), found, strict=True) if match)
