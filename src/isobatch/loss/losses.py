"""Group `loss`: what is minimised. `averages` tells how shards are weighted: a mean over samples, or a sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from isobatch.checks import positive, within
from isobatch.errors import ConfigError
from isobatch.marks import option

if TYPE_CHECKING:
    import torch
    from torch import nn

    Prepare = Callable[..., Any] | None


@dataclass(frozen=True)
class Loss:
    """What all losses share.

    `build` gives the criterion: (output in fp32, targets) -> 0-d loss, or what else a criterion gives (given.py);
    `evaluation` the same without what only training wants. A `Sum` is weighted by its elements, whatever `averages` says.
    `prepare` may add to what a micro batch brings: it wraps the batch transform (mixup) that comes before it.
    """

    averages = True
    several = True  # whether it can be about several labels of a sample

    def couples(self, criterion: Any) -> bool:
        """Whether `criterion`, as `build` gave it, lets the samples of a forward meet in more than their mean or sum: then it
        is asked once for each shard."""
        return False

    def build(self) -> Any:
        raise AssertionError("a loss defines build")

    def evaluation(self) -> Any:
        """The plain loss: smoothing and thresholds of targets are training's, and would make runs incomparable."""
        plain = {key: value for key, value in (("label_smoothing", 0.0), ("target_threshold", None)) if hasattr(self, key)}
        return (replace(self, **plain) if plain else self).build()

    def prepare(self, transform: Prepare, teacher: Callable[[dict[str, Any]], nn.Module], precision: Any,
                device: torch.device, seed: int) -> Prepare:  # fmt: skip
        """
        Args:
            transform: (inputs, targets, step, shards, lanes) -> (inputs, targets), or None.
            teacher: from options to a frozen network in evaluation mode on the device.
        Returns:
            the same kind of function.
        """
        return transform


@dataclass(frozen=True)
class Smoothed(Loss):
    """What losses on classes share: targets that are not quite one class."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        within("loss.label_smoothing", self.label_smoothing, 0, 1)


@dataclass(frozen=True)
class CrossEntropy(Smoothed):
    """Softmax cross entropy on class indices (N, ...) or probabilities (N, C, ...) (mixup); logits (N, C, ...).

    Pixels, tokens and weighted classes are weighted by elements: what torch's mean over the whole window in one forward gives.

    Args:
        class_weights: a number per class; null = all alike.
        ignore_index: the label that is left out. null: -100 among labels of pixels and tokens (torch's default); one label
            of a whole sample always counts.
    """

    name: str = "cross_entropy"
    several = False
    class_weights: list[float] | None = None
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_weights("loss.class_weights", self.class_weights)

    def build(self) -> Any:
        from isobatch.loss.elements import ElementCrossEntropy

        return ElementCrossEntropy(self.class_weights, self.ignore_index, self.label_smoothing)


@dataclass(frozen=True)
class Focal(CrossEntropy):
    """(1 - p)^gamma * cross entropy, p the probability of the right class (Lin et al. 2017); as cross_entropy otherwise.

    Args:
        gamma: how much less what is known well counts; 0 = cross entropy.
    """

    name: str = "focal"
    gamma: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        within("loss.gamma", self.gamma, 0, 100)
        if self.label_smoothing:
            raise ConfigError("loss.label_smoothing", self.label_smoothing, "focal looks at the probability of one class",
                              "set loss.label_smoothing=0")  # fmt: skip

    def build(self) -> Any:
        from isobatch.loss.elements import FocalLoss

        return FocalLoss(self.class_weights, self.ignore_index, self.gamma)


@dataclass(frozen=True)
class BinaryCrossEntropy(Smoothed):
    """timm's: every class for itself (Wightman et al. 2021); class indices (N,) or probabilities (N, C), logits (N, C).

    Several labels of a sample are a row of zeros and ones (N, C).

    Args:
        pos_weight: of the ones beside the zeros, a number or one per class; null = 1.
        target_threshold: targets above it count as 1, the others as 0 (null: as they are); for mixup.
        sum_classes: sum over the classes instead of their mean.
    """

    name: str = "bce"
    target_threshold: float | None = None
    sum_classes: bool = False
    pos_weight: Any = None

    def __post_init__(self) -> None:
        one = [self.pos_weight] if isinstance(self.pos_weight, int | float) else self.pos_weight
        check_weights("loss.pos_weight", one)
        within("loss.label_smoothing", self.label_smoothing, 0, 0.999)
        if self.target_threshold is not None:
            within("loss.target_threshold", self.target_threshold, 0, 1)

    def build(self) -> nn.Module:
        from isobatch.loss.elements import OnDevice
        from isobatch.runtime.timm_import import timm

        plain = timm.loss.BinaryCrossEntropy(self.label_smoothing, self.target_threshold, sum_classes=self.sum_classes)
        return plain if self.pos_weight is None else OnDevice(plain, "pos_weight", self.pos_weight)


@dataclass(frozen=True)
class JensenShannon(Smoothed):
    """timm's JsdCrossEntropy (Hendrycks et al. 2019): cross entropy on the sample, and the same answer on views of it.

    The views are made on the device, from (seed, step, shard): moved by up to `shift` of the image, and noise added.

    Args:
        num_splits: the sample and num_splits - 1 views; alpha: weight of their agreement.
        noise: its standard deviation, in units of the normalised input; shift: 0.125 = up to an eighth of each side.
    """

    name: str = "jsd"
    several = False
    num_splits: int = 3
    alpha: float = 12.0
    noise: float = 0.3
    shift: float = 0.125

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_splits < 2:
            raise ConfigError("loss.num_splits", self.num_splits, "there is nothing to compare the sample with",
                              "set loss.num_splits=3")  # fmt: skip
        for key, high in (("alpha", 1e6), ("noise", 1e6), ("shift", 1)):
            within(f"loss.{key}", getattr(self, key), 0, high)

    def build(self) -> Any:
        from isobatch.loss.views import Agreement

        return Agreement(self.num_splits, self.alpha, self.label_smoothing)

    def prepare(self, transform: Prepare, teacher: Callable[[dict[str, Any]], nn.Module], precision: Any,
                device: torch.device, seed: int) -> Prepare:  # fmt: skip
        from isobatch.loss.views import Views

        return Views(transform, self.num_splits, self.noise, self.shift, seed)


NO_TEACHER: dict[str, Any] = {"arch": None, "pretrained": False, "checkpoint": None, "kwargs": {}}


@dataclass(frozen=True)
class Distillation(Smoothed):
    """(1 - weight) * cross entropy + weight * T^2 * KL(teacher / T || student / T) (Hinton et al. 2015).

    Evaluation reports the cross entropy alone, so that runs with and without a teacher compare.

    Args:
        teacher: `arch` (timm's name) with `pretrained` and `kwargs`, or `checkpoint`, a run folder of this program
            whose model (its average, where it kept one) teaches.
        temperature: T; weight: of the teacher.
    """

    name: str = "distill"
    several = False
    temperature: float = 2.0
    weight: float = 0.5
    teacher: dict[str, Any] = option(factory=lambda: dict(NO_TEACHER), path=("checkpoint",))

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("loss.temperature", self.temperature)
        within("loss.weight", self.weight, 0, 1)
        for key in self.teacher:
            if key not in NO_TEACHER:
                raise ConfigError(f"loss.teacher.{key}", self.teacher[key], "a teacher has no such option",
                                  f"choose from {', '.join(NO_TEACHER)}")  # fmt: skip
        for key, kind, word in (("arch", str, "name"), ("checkpoint", str, "path"), ("pretrained", bool, "true or false"),
                                ("kwargs", dict, "mapping")):  # fmt: skip
            value = self.teacher.get(key)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"loss.teacher.{key}", value, f"is no {word}", "give it one, or leave it out")
        given = [key for key in ("arch", "checkpoint") if self.teacher.get(key)]
        if len(given) != 1:
            raise ConfigError("loss.teacher.arch", self.teacher.get("arch"),
                              "exactly one of loss.teacher.arch and loss.teacher.checkpoint names the teacher",
                              "set loss.teacher.arch=resnet50 loss.teacher.pretrained=true, or "
                              "loss.teacher.checkpoint=<run folder>")  # fmt: skip

    def build(self) -> Any:
        from torch import nn

        from isobatch.loss.distill import WithTeacher

        return WithTeacher(nn.CrossEntropyLoss(label_smoothing=self.label_smoothing), self.temperature, self.weight)

    def prepare(self, transform: Prepare, teacher: Callable[[dict[str, Any]], nn.Module], precision: Any,
                device: torch.device, seed: int) -> Prepare:  # fmt: skip
        from isobatch.loss.distill import Teaching

        return Teaching(transform, teacher({**NO_TEACHER, **self.teacher}), lambda: precision.teacher(device))


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """Mean over samples of the squared difference; output and target of the same shape."""

    name: str = "mse"

    def build(self) -> nn.Module:
        from torch import nn

        return nn.MSELoss()


@dataclass(frozen=True)
class OutputMean(Loss):
    """The mean of the model's output; the target is not used."""

    name: str = "output_mean"

    def build(self) -> Any:
        return _mean


@dataclass(frozen=True)
class OutputSum(Loss):
    """The sum of the model's output; averaged over the shards, as DDP averages gradients. The target is not used."""

    name: str = "output_sum"
    averages = False

    def build(self) -> Any:
        return _sum


def check_weights(key: str, weights: Any) -> None:
    """Raise ConfigError unless `weights` is null or a list of numbers >= 0, not all of them 0."""
    if weights is None:
        return
    numbers = isinstance(weights, list) and all(isinstance(w, int | float) and not isinstance(w, bool) for w in weights)
    if not numbers or any(not 0 <= w < 1e30 for w in weights) or not any(weights):
        raise ConfigError(key, weights, "is no list of weights >= 0, of which one is above 0", f"set {key}=[1.0, 2.5], or null")


def _mean(output: Any, target: Any) -> Any:
    return output.mean()


def _sum(output: Any, target: Any) -> Any:
    return output.sum()
