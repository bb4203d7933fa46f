"""How long an update takes on more replicas than there are here: compute as measured, the network as computed.

No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from isobatch.batch_plan import Batch, ceil_div
from isobatch.config import CostOptions
from isobatch.parallel.wire import Exchange, Ring, WeightsInParts, WholeGradients

REPLICAS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)


def seconds(options: CostOptions, rings: tuple[Ring, ...]) -> float:
    """One ring after another: in each ranks - 1 messages in a row, of nbytes / ranks, each with a latency per piece."""
    assert options.bandwidth_gb_s is not None
    byte_s, latency_s = 1e-9 / options.bandwidth_gb_s, options.latency_us * 1e-6
    return sum((r.ranks - 1) * (r.nbytes / r.ranks * byte_s + r.pieces * latency_s) for r in rings)


@dataclass(frozen=True)
class Measured:
    """Seconds of one micro step here: forward and backward of `samples` samples."""

    samples: int
    forward_s: float
    backward_s: float

    @property
    def sample_s(self) -> float:
        return (self.forward_s + self.backward_s) / self.samples


@dataclass(frozen=True)
class Row:
    """One update on `replicas` replicas. Times in ms, efficiencies in 0 .. 1.

    Args:
        efficiency: against one replica with the same effective batch.
        network_ms: what is sent, hidden behind compute or not.
        grown: against one replica when the effective batch grows with the replicas: another training.
    """

    replicas: int
    micro_batch: int
    accumulation_steps: int
    compute_ms: float
    network_ms: float
    update_ms: float
    samples_per_s: float
    efficiency: float
    grown: float


def row(batch: Batch, replicas: int, measured: Measured, wire: WholeGradients | WeightsInParts, options: CostOptions) -> Row:
    """
    Args:
        batch: as planned; on more replicas each holds no more than its part, on fewer they accumulate.
        wire: what replicas exchange in a window.
    """
    here = batch.on(replicas)
    largest = min(here.at_once * ceil_div(here.effective, here.num_shards), here.effective)
    compute = here.accumulation_steps * largest * measured.sample_s
    window = wire.window(replicas, here.accumulation_steps)
    network = sum(seconds(options, exchange.forward + exchange.backward) for exchange in window)
    update = compute + _waiting_s(window, largest, measured, options)
    alone, steps = batch.effective * measured.sample_s, ceil_div(batch.effective, batch.micro)
    grown = alone + _waiting_s(wire.window(replicas, steps), batch.effective / steps, measured, options)
    return Row(replicas, here.micro, here.accumulation_steps, compute * 1e3, network * 1e3, update * 1e3,
               here.effective / update, alone / (replicas * update), alone / grown)  # fmt: skip


def _waiting_s(window: list[Exchange], samples: float, measured: Measured, options: CostOptions) -> float:
    """Seconds that a window takes beyond its compute: each forward and each backward, of `samples` samples, hides what it
    can of the exchange beside it."""
    forward, backward = (s / measured.samples * samples for s in (measured.forward_s, measured.backward_s))
    return sum(max(0.0, seconds(options, exchange.forward) - forward) + max(0.0, seconds(options, exchange.backward) - backward)
               for exchange in window)  # fmt: skip


def rows(batch: Batch, measured: Measured, wire: WholeGradients | WeightsInParts, options: CostOptions) -> list[Row]:
    """From 1 to 4,096 replicas, and the number that is planned."""
    counts = sorted({*REPLICAS, batch.num_replicas})
    return [row(batch, count, measured, wire, options) for count in counts]


HEAD = ("replicas", "micro batch", "micro steps", "compute ms", "network ms", "update ms", "samples/s", "efficiency",
        "batch grows")  # fmt: skip


def table(found: list[Row]) -> list[tuple[str, ...]]:
    """The rows as text, under HEAD."""
    return [(f"{r.replicas:,}", str(r.micro_batch), str(r.accumulation_steps), f"{r.compute_ms:.2f}",
             f"{r.network_ms:.2f}", f"{r.update_ms:.2f}", f"{r.samples_per_s:,.0f}", f"{100 * r.efficiency:.1f} %",
             f"{100 * r.grown:.1f} %") for r in found]  # fmt: skip
