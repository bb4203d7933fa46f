"""Group `debug`: a training made small, or watched, to find out why it does not train. The same on every plan.

A choice changes the config that the run is built from, and nothing else: the loop and the step know none of it.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.checks import positive
from isobatch.errors import ConfigError
from isobatch.marks import Marks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from isobatch.data import Split

NEVER = 2**31 - 1  # steps between two evaluations; the last step of a run is evaluated all the same


@dataclass(frozen=True)
class NoDebug:
    """The training as it is."""

    name: str = "none"

    def on(self, config: Any, effective: int) -> Any:
        """The config that is trained. effective: samples of a window."""
        return config

    def evaluated(self, split: Split, effective: int) -> Split:
        """What an evaluation of the training looks at."""
        return split

    def check_with(self, config: Any) -> None:
        """Raise ConfigError for settings that it cannot be with."""

    def watching(self) -> AbstractContextManager[Any]:
        """Around the training."""
        return nullcontext()


class SameAgain:
    """The first `samples` of a sampler's first epoch, in every epoch. What is drawn for a sample differs."""

    def __init__(self, sampler: Any, samples: int):
        self.sampler, self.samples = sampler, samples
        self.name, self.tail = sampler.name, sampler.tail

    def order_size(self, n: int) -> int:
        return min(self.samples, int(self.sampler.order_size(n)))

    def order(self, epoch: int, n: int, seed: int, targets: Callable[[], Tensor]) -> Tensor:
        found: Tensor = self.sampler.order(0, n, seed, targets)[: self.order_size(n)]
        return found


@dataclass(frozen=True)
class Overfit(NoDebug):
    """The first windows again and again: a model and a loss that are right bring the loss of one to nothing.

    An epoch is these windows. Without eval_every the only evaluation is at the end.

    Args:
        windows: how many.
    """

    name: str = "overfit"
    windows: int = 1

    def __post_init__(self) -> None:
        positive("debug.windows", self.windows)

    def on(self, config: Any, effective: int) -> Any:
        return dataclasses.replace(config, sampler=SameAgain(config.sampler, self.windows * effective),
                                   eval_every=config.eval_every or NEVER)  # fmt: skip


@dataclass(frozen=True)
class Short(NoDebug):
    """A few windows, an evaluation, a checkpoint, and the end: whether all of a run works.

    Args:
        windows: how many. The evaluation is of as many samples, from all of its split.
    """

    name: str = "short"
    windows: int = 3

    def __post_init__(self) -> None:
        positive("debug.windows", self.windows)

    def on(self, config: Any, effective: int) -> Any:
        return dataclasses.replace(config, steps=self.windows, epochs=None, eval_every=NEVER)

    def evaluated(self, split: Split, effective: int) -> Split:
        return split.some(self.windows * effective)


@dataclass(frozen=True)
class Anomaly(NoDebug):
    """torch's anomaly detection: a backward that makes a NaN raises, and the forward that it belongs to is shown. Slow."""

    name: str = "anomaly"

    def check_with(self, config: Any) -> None:
        for key in ("compile", "cuda_graph"):
            if value := getattr(config, key):
                raise ConfigError(key, value, "hides what debug=anomaly watches", f"set {key}=false, or debug=none")

    def watching(self) -> AbstractContextManager[Any]:
        import torch

        return torch.autograd.detect_anomaly(check_nan=True)


TABLE: dict[str, Any] = {"none": NoDebug, "overfit": Overfit, "short": Short, "anomaly": Anomaly}
# free: a run that was overfitted has epochs of another size, by which a resume with another order is refused
MARKS = Marks("free")
