"""What every dataset hands over: two splits, and what a model needs to know of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from isobatch.checks import choice, within
from isobatch.errors import ConfigError
from isobatch.marks import option

if TYPE_CHECKING:
    from torch import Tensor


MOST_WORKERS = 1024
MOST_AHEAD = 10_000  # batches of one worker; each is asked for before the first one is waited for


@dataclass(frozen=True)
class DataInfo:
    """What the rest needs to know of a dataset.

    Args:
        shape: of one input, without the batch: (C, H, W) for images, (features,) for vectors; of several inputs the first.
        num_classes: 0 = targets are numbers, not classes.
        labels: where there are classes, `one` of a sample, `several` (a row of zeros and ones), or one of each of its `pixels`.
        outputs: where there are none, how many numbers a target has; 0 = nobody has said.
        mean, std: per channel, of inputs in 0 .. 1; applied on the device when inputs arrive as uint8. () = inputs are taken
            as the data set gives them.
        class_names: in the order of the model's outputs; () = nobody has named them.
        eval_size, crop_pct, interpolation: how an evaluation cuts its images out; None = it takes them as they are.
        notes: what a person should hear of the data before it is trained on, one line each.
    """

    name: str
    shape: tuple[int, ...]
    num_classes: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    class_names: tuple[str, ...] = ()
    eval_size: int | tuple[int, int] | None = None
    crop_pct: float | None = None
    interpolation: str | None = None
    notes: tuple[str, ...] = ()
    labels: str = "one"
    outputs: int = 0

    @property
    def answers(self) -> int:
        """How many outputs a model has for it, 0 = nobody knows."""
        return self.num_classes or self.outputs

    @property
    def in_chans(self) -> int:
        return self.shape[0]

    @property
    def features(self) -> int:
        size = 1
        for n in self.shape:
            size *= n
        return size


class Split:
    """A map-style dataset: `dataset[i] -> (input, target)`, len(dataset) samples, in a fixed order.

    Args:
        dataset: may have `describe(i) -> str`, which names sample i (its file) when it cannot be read; `at_epoch(epoch)`, which
            is told the epoch of the samples that are read next; and `largest_epoch`, one whose inputs are the largest.
        tensors: (inputs, targets) when all of it is in memory, ready for the model: then batches are indexed on the
            device and no worker is involved.
        targets: gives all class labels (N,) int64, for samplers that weigh by class.
        info: mean and std for uint8 inputs.
        light: a sample costs so little that a worker process would only slow it down.
        collate: a list of (input, target) -> (inputs, targets) of a batch; None: leaf by leaf, one dimension more.
    """

    def __init__(self, dataset: Any, tensors: tuple[Tensor, Tensor] | None = None,
                 targets: Callable[[], Tensor] | None = None, info: DataInfo | None = None, light: bool = False,
                 collate: Callable[[list[Any]], Any] | None = None):  # fmt: skip
        self.dataset, self.tensors, self.info, self.collate = dataset, tensors, info, collate
        self.light = light or tensors is not None
        self.targets = targets if targets is not None else self._scan_targets

    def __len__(self) -> int:
        return len(self.dataset)

    def some(self, count: int) -> Split:
        """`count` of its samples, at even distances (classes often lie one behind the other); itself where it has no more."""
        from isobatch.data.held_out import SomeSamples

        n = len(self)
        if count >= n:
            return self
        rows = [k * n // count for k in range(count)]
        tensors = None if self.tensors is None else (self.tensors[0][rows], self.tensors[1][rows])

        def labels() -> Tensor:
            found = self.targets()
            return found[rows] if len(found) else found  # empty: no sample has a class of its own

        targets = None if self.targets == self._scan_targets else labels  # else a few would scan them all
        return Split(SomeSamples(self.dataset, rows), tensors, targets, self.info, self.light, self.collate)

    def describe(self, index: int) -> str:
        """How a person finds sample `index`."""
        name = getattr(self.dataset, "describe", None)
        return f"sample {index}" if name is None else f"sample {index} ({name(index)})"

    def _scan_targets(self) -> Tensor:
        import torch

        if self.tensors is not None:
            return self.tensors[1]
        return torch.tensor([self.dataset[i][1] for i in range(len(self.dataset))])


@dataclass(frozen=True)
class Splits:
    """`test`: a third split that no training sees, for `evaluate.split=test`; None = the data set has none."""

    train: Split
    eval: Split
    info: DataInfo
    test: Split | None = None

    def fingerprint(self, options: Any, wanted: bool = True) -> dict[str, Any]:
        """`data_fingerprint` of both (see data/fingerprint.py), as group `data` asks for it."""
        from isobatch.data import fingerprint

        contents = getattr(options, "fingerprint", "names") == "contents"
        both = {"train": self.train, "eval": self.eval} if wanted else {}
        return {"data_fingerprint": {name: fingerprint.of(split, contents) for name, split in both.items()}}


class DataOptions(Protocol):
    """The options of group `data`. `kind`: `images` or `vectors`."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def num_workers(self) -> int | None: ...

    def load(self, augment: Any, seed: int) -> Splits:
        """Both splits; `augment` transforms one training sample, `seed` is the run's."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How samples that are not in memory get read.

    Args:
        num_workers: processes that read and augment; 0 = the training process itself, null = from the cores.
        persistent_workers: keep the evaluation's workers from one evaluation to the next.
        prefetch: batches that each worker reads ahead.
        pin_memory: null = on CUDA.
        on_error: a training sample that cannot be decoded: `stop`, or `replace` it by the next one that can and say so.
            In an evaluation it always stops, since a replacement would falsify the result.
    """

    num_workers: int | None = option(None, resume="free")
    persistent_workers: bool = option(True, resume="free")
    prefetch: int = option(2, resume="free")
    pin_memory: bool | None = option(None, resume="free")
    on_error: str = "stop"

    def __post_init__(self) -> None:
        check_workers(self.num_workers)
        within("data.prefetch", self.prefetch, 1, MOST_AHEAD)
        choice("data.on_error", self.on_error, ("stop", "replace"))


def check_workers(num_workers: int | None) -> None:
    """Raise ConfigError unless `num_workers` is null, or a number of processes that a machine can have."""
    if num_workers is not None and num_workers < 0:
        raise ConfigError("data.num_workers", num_workers, "is negative",
                          "set data.num_workers=0 (none), or null (from the cores)")  # fmt: skip
    if num_workers is not None and num_workers > MOST_WORKERS:
        raise ConfigError("data.num_workers", num_workers, "is more than any machine has cores for",
                          "set data.num_workers=null (from the cores)")  # fmt: skip
