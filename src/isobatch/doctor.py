"""`isobatch doctor`: what this machine offers a training and what stands in its way, on one screen.

Exit code 0: a training can start here. 1: something that it needs is missing or broken; its line says what helps.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

NEEDED = ("torch", "torchvision", "timm", "hydra-core", "omegaconf", "wandb", "safetensors", "rich", "matplotlib",
          "scikit-learn")  # fmt: skip
EXTRAS = {  # package -> what it is for
    "tensorboard": "logger=tensorboard", "trackio": "logger=trackio", "onnx": "export to ONNX", "datasets": "data=hugging_face",
    "hydra-submitit-launcher": "SLURM, parallel jobs", "optuna": "hydra/sweeper=search", "wandb-workspaces": "W&B dashboards",
}  # fmt: skip
FEW_BYTES = 2 * 2**30  # of a disk: a run of a small model with its checkpoints
FEW_SHARED = 2**30  # of /dev/shm: data workers hand over their batches in there


class Finding(NamedTuple):
    """One line. level: ok, note (it works, but), or bad (a training would fail)."""

    level: str
    what: str
    text: str


def ok(what: str, text: str) -> Finding:
    return Finding("ok", what, text)


def note(what: str, text: str) -> Finding:
    return Finding("note", what, text)


def bad(what: str, text: str) -> Finding:
    return Finding("bad", what, text)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> Iterator[Finding]:
    from isobatch import __version__

    here = f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield ok("isobatch", here) if sys.version_info >= (3, 11) else bad("isobatch", f"{here}: Python 3.11 or newer is needed")


def check_packages() -> Iterator[Finding]:
    found = {package: version(package) for package in NEEDED}
    missing = [package for package, there in found.items() if there is None]
    if missing:
        yield bad("packages", f"missing: {', '.join(missing)}; pip install -e . -c constraints.txt")
    yield ok("packages", ", ".join(f"{package} {there}" for package, there in found.items() if there))
    extras = {package: version(package) for package in EXTRAS}
    there = [f"{package} {v}" for package, v in extras.items() if v]
    absent = [f"{package} ({EXTRAS[package]})" for package, v in extras.items() if not v]
    yield ok("extras", ", ".join(there) or "none installed")
    if absent:
        yield note("extras", f"not installed: {', '.join(absent)}")


def check_devices() -> Iterator[Finding]:
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    if found is None:
        yield ok("devices", f"CPU ({torch.backends.cpu.get_cpu_capability()}); torch is {build}")
        if Path("/dev/nvidia0").exists():
            yield bad("devices", "there is an NVIDIA GPU, but torch cannot use it: see `nvidia-smi` for the driver's version, "
                      "and install a torch that fits it")  # fmt: skip
        return
    for index in range(torch.accelerator.device_count()):
        yield ok("devices", device_text(found.type, index))
    if found.type == "cuda" and torch.distributed.is_nccl_available():
        yield ok("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def device_text(kind: str, index: int) -> str:
    import torch

    if kind != "cuda":
        return f"{kind}:{index}"
    about = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return (f"cuda:{index} {about.name}, compute capability {about.major}.{about.minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")  # fmt: skip


def check_distributed() -> Iterator[Finding]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_gloo_available():
        yield ok("processes", "parallel=ddp works on CPUs too (gloo)")
    else:
        yield bad("processes", "torch was built without gloo: parallel=ddp and fsdp cannot start")


def check_cores() -> Iterator[Finding]:
    from isobatch.report import usable_cores

    usable, there = usable_cores(), os.cpu_count() or 1
    text = f"{usable} of {there} cores are this process's"
    threads = os.environ.get("OMP_NUM_THREADS")
    yield ok("cores", f"{text}; OMP_NUM_THREADS={threads}" if threads else text)
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > usable:
        yield note("cores", f"load {os.getloadavg()[0]:.1f}: other programs are using them, times will not be steady")


def check_memory() -> Iterator[Finding]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) / 2**20 for line in lines if len(line.split()) > 1}
        yield ok("memory", f"{sizes['MemAvailable']:.1f} of {sizes['MemTotal']:.1f} GiB free")
    except (OSError, KeyError, ValueError):
        pass
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        if free < FEW_SHARED:
            yield note("memory", f"/dev/shm has {free / 2**20:.0f} MiB free: data workers may die; "
                       "give the container more (--shm-size=8g), or set data.num_workers=0")  # fmt: skip


def check_disk() -> Iterator[Finding]:
    for what, folder in (("runs", Path.cwd()), ("temporary files", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(folder).free
        if not os.access(folder, os.W_OK):
            yield bad("disk", f"{folder} ({what}) cannot be written; set hydra.run.dir, or TMPDIR")
        elif free < FEW_BYTES:
            yield note("disk", f"{folder} ({what}) has {free / 2**30:.1f} GiB free: checkpoints may not fit")
        else:
            yield ok("disk", f"{folder} ({what}): {free / 2**30:.0f} GiB free")


def check_wandb() -> Iterator[Finding]:
    from isobatch.logger.access import resolve

    access = resolve("auto")
    where = f" ({access.base_url})" if access.mode == "online" else ""
    yield ok("W&B", access.mode + (f", {access.why}" if access.why else "") + where)


CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    check_python, check_packages, check_devices, check_distributed, check_cores, check_memory, check_disk, check_wandb,
)  # fmt: skip


def examine(checks: Sequence[Callable[[], Iterable[Finding]]] = CHECKS) -> list[Finding]:
    """All findings in order; a check that fails is a finding itself."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check()
        except Exception as error:  # a broken install is what this command is for
            said = " ".join(str(error).split()) or type(error).__name__
            found.append(bad(check.__name__.removeprefix("check_"), f"{type(error).__name__}: {said[:200]}"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; exit code 1 if one of them is bad."""
    parser = argparse.ArgumentParser(prog="isobatch doctor", description=__doc__.splitlines()[0].split(": ", 1)[1])
    parser.parse_args(argv)
    found = examine()
    width = max(len(finding.what) for finding in found)
    marks = {"ok": " ", "note": "!", "bad": "x"}
    latest = ""
    for finding in found:
        print(f"{marks[finding.level]} {'' if finding.what == latest else finding.what:<{width}}  {finding.text}")
        latest = finding.what
    problems = sum(finding.level == "bad" for finding in found)
    print("a training can start here" if not problems else f"{problems} problem{'s' * (problems > 1)}: see the lines with x")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())
