"""Options for plain functions and classes that users register: `name`, `kwargs`, and what the group cannot do without."""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.checks import LARGEST, choice, within
from isobatch.data.base import DataInfo, Reading, Split, Splits
from isobatch.data.held_out import HeldOut
from isobatch.errors import ConfigError
from isobatch.extend.datasets import Augmented, SomeOfOwn, labels_of, one_class_each
from isobatch.loss import Loss
from isobatch.model import Model
from isobatch.sampler import TAILS

if TYPE_CHECKING:
    from torch import Tensor, nn


log = logging.getLogger(__name__)
COLLATES: dict[str, Callable[..., Any]] = {}  # isobatch.register("collate", name, f)


def called(group: str, options: Any, *args: Any) -> Any:
    """The registered function's result for these options.

    Raises:
        ConfigError: it does not take these kwargs. What it raises itself passes.
    """
    try:
        inspect.signature(options.factory).bind(*args, **options.kwargs)
    except TypeError as error:
        raise ConfigError(f"{group}.kwargs", options.kwargs, f"{options.name} cannot be called with them ({error})",
                          f"set {group}.kwargs to what {options.name} takes") from None  # fmt: skip
    return options.factory(*args, **options.kwargs)


@dataclass(frozen=True)
class CustomModel(Model):
    """`f(num_classes, in_chans, **kwargs) -> nn.Module`."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    factory: ClassVar[Callable[..., Any]]

    def build(self, info: DataInfo) -> nn.Module:
        try:
            model: nn.Module = called("model", self, info.num_classes, info.in_chans)
        except ConfigError:
            raise
        except Exception as error:
            log.debug("model=%s", self.name, exc_info=True)
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError("model.name", self.name, f"could not be built ({type(error).__name__}: {error}, in "
                              f"{place.filename} line {place.lineno})", "repair it, or model.kwargs") from error  # fmt: skip
        return model


@dataclass(frozen=True)
class CustomLoss(Loss):
    """`f(**kwargs)` -> criterion `(output, target)` -> a mean over the samples, or what given.py says.

    It is asked once for each shard, unless it says by `couples = False` that it is a plain mean, so that the shards of a
    forward may be asked for together.
    """

    name: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    factory: ClassVar[Callable[..., Any]]

    def build(self) -> Any:
        from isobatch.loss.elements import by_elements

        return by_elements(called("loss", self))

    def couples(self, criterion: Any) -> bool:
        return bool(getattr(criterion, "couples", True))


@dataclass(frozen=True)
class CustomSampler:
    """`f(epoch, n, seed, **kwargs)` -> the order of one epoch, n indices below n."""

    name: str = ""
    tail: str = "keep"
    kwargs: dict[str, Any] = field(default_factory=dict)
    factory: ClassVar[Callable[..., Any]]

    def __post_init__(self) -> None:
        choice("sampler.tail", self.tail, TAILS)

    def order_size(self, n: int) -> int:
        return n

    def order(self, epoch: int, n: int, seed: int, targets: Callable[[], Tensor]) -> Tensor:
        import torch

        order = torch.as_tensor(called("sampler", self, epoch, n, seed), dtype=torch.int64)
        if order.shape != (n,) or (n and not 0 <= int(order.min()) <= int(order.max()) < n):
            raise ConfigError("sampler.name", self.name, f"gave an order of shape {tuple(order.shape)} for {n} samples",
                              f"return {n} indices from 0 to {n - 1}")  # fmt: skip
        return order


@dataclass(frozen=True, kw_only=True)
class CustomData(HeldOut, Reading):
    """`f(split, **kwargs)` -> map-style dataset of (input, target); split is "train" or "eval".

    Inputs are tensors, arrays or PIL images; images in uint8 are normalised on the device. It may have `classes` (names) or
    `num_classes`, `targets` (all labels) and `describe(i)` (a name for error messages).

    Args:
        num_classes: null = what the dataset says, else the highest of its `targets` + 1, else 0 (no classes).
        mean, std: per channel, of pixels in 0 .. 1; null = uint8 images are only scaled to 0 .. 1.
        collate: registered as isobatch.register("collate", name, f): a list of (input, target) -> (inputs, targets) of a
            batch, for samples of no common size; null = leaf by leaf, one dimension more.
        holdout, fold, ...: see HeldOut; of f("train"), as it gives them, in the proportion of its `targets`; f("eval") is not
            asked for then.
        in_chans: what PIL images of any mode become: 3 (RGB) or 1 (grey); null = what the first one is.
    """

    name: str = ""
    num_classes: int | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    in_chans: int | None = None
    collate: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    factory: ClassVar[Callable[..., Any]]
    kind = "images"

    def __post_init__(self) -> None:
        from isobatch.data.images import check_normalization

        super().__post_init__()
        within("data.num_classes", self.num_classes or 0, 0, LARGEST)
        choice("data.in_chans", self.in_chans, (None, 1, 3))
        if self.collate is not None and self.collate not in COLLATES:
            raise ConfigError("data.collate", self.collate, "is not registered", "type imports=[module] where it is, "
                              f"or choose one of {', '.join(COLLATES) or 'none'}")  # fmt: skip
        check_normalization("mean", self.mean)
        check_normalization("std", self.std)

    def load(self, augment: Any, seed: int) -> Splits:
        from isobatch.runtime.randomness import isolated_generators, seed_everything, seed_of

        with isolated_generators():  # a dataset that is drawn at random is the same on every rank
            seed_everything(seed_of("data", seed, 0))
            train = self._usable("train")
            if self.holds_out:
                rest, held = self.parted(one_class_each(train))
                train, evaluation = SomeOfOwn(train, rest), SomeOfOwn(train, held)
            else:
                seed_everything(seed_of("data", seed, 1))
                evaluation = self._usable("eval")
        names = [list(map(str, getattr(dataset, "classes", None) or ())) for dataset in (train, evaluation)]
        if names[1] and names[0] != names[1]:
            raise ConfigError("data.name", self.name, f"its eval split has the classes {_few(names[1])}, and its train split "
                              f"{_few(names[0])}", "number both alike")  # fmt: skip
        if augment is not None:
            train = Augmented(train, augment, self.in_chans)
        info = self._info(train)
        if isinstance(train, Augmented):
            train.channels = info.in_chans
        return Splits(Split(train, targets=labels_of(train), info=info, collate=self.own_collate),
                      Split(evaluation, targets=labels_of(evaluation), info=info, collate=self.own_collate), info)  # fmt: skip

    def _usable(self, which: str) -> Any:
        dataset = called("data", self, which)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or not len(dataset):
            problem = "is empty" if hasattr(dataset, "__len__") else "has no len() or [i]"
            raise ConfigError("data.name", self.name, f"its {which} split {problem}", "return a map-style dataset")
        return dataset

    @property
    def own_collate(self) -> Callable[..., Any] | None:
        return None if self.collate is None else COLLATES[self.collate]

    def examples(self, seed: int) -> Callable[[int], Any]:
        """n -> the inputs of the first n samples of the evaluation, as a batch: of which form they are, only they tell."""
        from isobatch.data.samples import Failure, Samples

        split = self.load(None, seed).eval

        def first(n: int) -> Any:
            read = Samples(split, seed).isolated((0, [i % len(split) for i in range(n)]))
            if isinstance(read, Failure):
                raise ConfigError("data.name", self.name, read.line, "repair the dataset")
            return read.inputs

        return first

    def unlabelled(self, seed: int) -> Split:
        """The samples of `f("predict", **kwargs)`, for task=predict: inputs alone, or pairs whose labels nobody looks at."""
        from isobatch.runtime.randomness import isolated_generators, seed_everything, seed_of

        with isolated_generators():
            seed_everything(seed_of("data", seed, 2))
            dataset = self._usable("predict")
        return Split(dataset, info=DataInfo(self.name, (self.in_chans or 3, 1, 1)), collate=self.own_collate)

    def _info(self, dataset: Any) -> DataInfo:
        import torch
        from torch.utils._pytree import tree_leaves

        from isobatch.data.samples import Failure, Samples

        wanted = DataInfo("", (self.in_chans, 1, 1)) if self.in_chans else None
        first = Samples(Split(dataset, info=wanted, collate=self.own_collate), 0).isolated((0, [0]))
        if isinstance(first, Failure):
            raise ConfigError("data.name", self.name, first.line, "repair the dataset")
        classes = tuple(str(c) for c in getattr(dataset, "classes", ()))
        count = self.num_classes
        if count is None:
            count = getattr(dataset, "num_classes", None) or len(classes)
        if not count and hasattr(dataset, "targets") and not torch.is_floating_point(torch.as_tensor(dataset.targets)):
            count = int(torch.as_tensor(dataset.targets).max()) + 1
        leaves = [leaf for leaf in tree_leaves(first.inputs) if isinstance(leaf, torch.Tensor)]
        one = next((leaf for leaf in leaves if leaf.ndim > 1), leaves[0] if leaves else None)  # beside it there may be numbers
        if one is None:
            raise ConfigError("data.name", self.name, f"its inputs hold no tensor, but a {type(first.inputs).__name__}",
                              "return tensors, arrays, numbers or images")  # fmt: skip
        shape = tuple(one.shape[1:])
        if not shape:
            raise ConfigError("data.name", self.name, "its inputs are single numbers", "give them one dimension, (1,)")
        for key in ("mean", "std"):
            value = getattr(self, key)
            if value and len(value) not in (1, shape[0]):
                raise ConfigError(f"data.{key}", value, f"is not one number per channel ({shape[0]})", f"set data.{key}=null")
        pixels = one.dtype == torch.uint8 and len(shape) == 3
        if not pixels and (self.mean or self.std):
            raise ConfigError("data.mean", self.mean, f"its inputs are {one.dtype}, and only uint8 images are "
                              "normalised here", "set data.mean=null data.std=null, or return uint8 images")  # fmt: skip
        mean, std = (tuple(value or [default]) for value, default in ((self.mean, 0.0), (self.std, 1.0)))
        mean, std = ((v * shape[0] if len(v) == 1 else v) if pixels else () for v in (mean, std))
        return DataInfo(self.name, shape, count or 0, mean, std, classes)


def _few(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f", ... ({len(names)})" if len(names) > 8 else "") or "none"


@dataclass(frozen=True)
class CustomWriter:
    """`f(folder, about, **kwargs)` -> a writer of predictions: write(answered) and close() (see writer.Writer)."""

    name: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    factory: ClassVar[Callable[..., Any]]
    whole: ClassVar[bool] = True

    def check(self) -> None:
        """There is nothing to refuse before it is called."""

    def build(self, folder: Any, about: Any) -> Any:
        return called("writer", self, folder, about)


BASES: dict[str, type] = {"model": CustomModel, "data": CustomData, "loss": CustomLoss, "sampler": CustomSampler,
                          "writer": CustomWriter}  # fmt: skip
