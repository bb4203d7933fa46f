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

    `build` gives the criterion: (output in fp32, targets) -> 0-d loss; `evaluation` the same without what only training wants.
    `prepare` may add to what a micro batch brings: it wraps the batch transform (mixup) that comes before it.
    """

    averages = True

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
class CrossEntropy(Loss):
    """Softmax cross entropy on class indices (N,) or class probabilities (N, C) (mixup); logits (N, C)."""

    name: str = "cross_entropy"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        within("loss.label_smoothing", self.label_smoothing, 0, 1)

    def build(self) -> nn.Module:
        from torch import nn

        return nn.CrossEntropyLoss(label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class BinaryCrossEntropy(CrossEntropy):
    """timm's: every class for itself (Wightman et al. 2021); class indices (N,) or probabilities (N, C), logits (N, C).

    Args:
        target_threshold: targets above it count as 1, the others as 0 (null: as they are); for mixup.
        sum_classes: sum over the classes instead of their mean.
    """

    name: str = "bce"
    target_threshold: float | None = None
    sum_classes: bool = False

    def __post_init__(self) -> None:
        within("loss.label_smoothing", self.label_smoothing, 0, 0.999)
        if self.target_threshold is not None:
            within("loss.target_threshold", self.target_threshold, 0, 1)

    def build(self) -> nn.Module:
        from isobatch.runtime.timm_import import timm

        return timm.loss.BinaryCrossEntropy(self.label_smoothing, self.target_threshold, sum_classes=self.sum_classes)


@dataclass(frozen=True)
class JensenShannon(CrossEntropy):
    """timm's JsdCrossEntropy (Hendrycks et al. 2019): cross entropy on the sample, and the same answer on views of it.

    The views are made on the device, from (seed, step, shard): moved by up to `shift` of the image, and noise added.

    Args:
        num_splits: the sample and num_splits - 1 views; alpha: weight of their agreement.
        noise: its standard deviation, in units of the normalised input; shift: 0.125 = up to an eighth of each side.
    """

    name: str = "jsd"
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
class Distillation(CrossEntropy):
    """(1 - weight) * cross entropy + weight * T^2 * KL(teacher / T || student / T) (Hinton et al. 2015).

    Evaluation reports the cross entropy alone, so that runs with and without a teacher compare.

    Args:
        teacher: `arch` (timm's name) with `pretrained` and `kwargs`, or `checkpoint`, a run folder of this program
            whose model (its average, where it kept one) teaches.
        temperature: T; weight: of the teacher.
    """

    name: str = "distill"
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
        from isobatch.loss.distill import WithTeacher

        return WithTeacher(super().build(), self.temperature, self.weight)

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


def _mean(output: Any, target: Any) -> Any:
    return output.mean()


def _sum(output: Any, target: Any) -> Any:
    return output.sum()
