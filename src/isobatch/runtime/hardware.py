"""What of the machine and of torch's settings decides speed and bits, set once and recorded with the run."""

from __future__ import annotations

import os
from typing import Any

import torch

from isobatch.batch_plan import Batch
from isobatch.config import Config, marked
from isobatch.runtime import cores, machine
from isobatch.runtime.distributed import Ranks

STREAMS = 4  # of a CUDA device, where `threads` says nothing: one host has to fill them all


def set_up(config: Config, ranks: Ranks, device: torch.device, begun: int = 1) -> int:
    """Set threads, determinism and matmul precision of this process; returns the number of threads of a kernel.

    Every setting is made explicitly, also the default ones, so that a sweep's jobs cannot see each other's.

    Args:
        begun: threads of a kernel in the run that goes on (1: there is none), for reduction=exact.
    """
    # on a CPU, convolution and LayerNorm gradients depend on the number of threads: exact has the same everywhere, and
    # other cores are for other shards (train/lanes.py)
    threads = begun if config.reduction.exact else config.threads or share_of_cores(ranks)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    # exact on CUDA takes torch's deterministic kernels too, but goes on where there are none: audit/determinism.py names those
    mode = 2 if config.deterministic else int(config.reduction.exact and device.type == "cuda")
    if mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if (torch.get_deterministic_debug_mode() == 2) != config.deterministic:
        torch.use_deterministic_algorithms(config.deterministic)  # brings torch's compiler along: 3 s of a start
    if torch.get_deterministic_debug_mode() != mode:
        torch.set_deterministic_debug_mode(mode)
    # fresh memory that is filled would hide from the audit what a kernel reads of it, and costs a kernel each
    torch.utils.deterministic.fill_uninitialized_memory = config.deterministic  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = device.type == "cuda" and not (config.deterministic or config.reduction.exact)
    torch.backends.cudnn.deterministic = config.deterministic or config.reduction.exact
    config.precision.setup()
    return threads


def share_of_cores(ranks: Ranks) -> int:
    """Cores for this rank, of those that the process may use."""
    return max(1, cores.usable() // ranks.local_world_size)


def lanes(config: Config, ranks: Ranks, device: torch.device, at_once: int) -> int:
    """Of `at_once` shards of an exact sum, those that run at the same time: on this rank's cores, or on streams."""
    if not config.reduction.exact or device.type not in ("cpu", "cuda"):
        return 1
    return min(at_once, config.threads or (share_of_cores(ranks) if device.type == "cpu" else STREAMS))


def wants_channels_last(config: Config, device: torch.device) -> bool:
    """Where it helps: tensor cores (16-bit types, tf32); on a CPU it costs 13 % in fp32 and gains 4 % in bf16 (measured)."""
    if config.channels_last is not None:
        return config.channels_last
    return config.data.kind == "images" and config.precision.on_tensor_cores(device)


def identity(config: Config, device: torch.device, threads: int, batch: Batch) -> dict[str, Any]:
    """All that changes bits although the contract is kept; compared on resume, as far as both runs know it.

    The machine and its libraries, every option that is marked so, and what this run makes of options that leave it open.
    """
    settled = {
        "threads": threads,
        "channels_last": wants_channels_last(config, device),
        "cuda_graph": bool(config.cuda_graph),
        "precision": config.precision.describe(device),
        "shard": batch.shard,
        **({} if config.reduction.exact else {"micro_batch": batch.micro}),
        "num_shards": batch.num_shards,
        "reduction": config.reduction.describe(batch.num_shards),
        "optimizer": config.optimizer.name,
    }
    options = {key: value for key, value, marks in marked.options(config.plain) if marks.resume == "identity"}
    return {**options, **machine.facts(device), **settled}
