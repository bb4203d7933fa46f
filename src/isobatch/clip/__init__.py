"""Group `clip`: what bounds the gradient of a whole window, after it is reduced and unscaled: the same on every plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from isobatch.checks import positive, within
from isobatch.errors import ConfigError
from isobatch.marks import Marks

if TYPE_CHECKING:
    from torch import nn

    from isobatch.clip.clipping import Clipping


class ClipOptions(Protocol):
    @property
    def name(self) -> str: ...

    def check_with(self, max_grad_norm: float | None) -> None:
        """Raise ConfigError where the older key says something else."""

    def build(self, model: nn.Module, max_grad_norm: float | None) -> Clipping: ...


@dataclass(frozen=True)
class NoClip:
    """Nothing, or what the older key `max_grad_norm` asks for: the same as `clip=norm`."""

    name: str = "none"

    def check_with(self, max_grad_norm: float | None) -> None: ...

    def build(self, model: nn.Module, max_grad_norm: float | None) -> Clipping:
        from isobatch.clip.clipping import Clipping, NormClipping

        return Clipping() if max_grad_norm is None else NormClipping(max_grad_norm)


@dataclass(frozen=True)
class _Clip:
    name: str = "clip"

    def check_with(self, max_grad_norm: float | None) -> None:
        if max_grad_norm is not None:
            raise ConfigError("max_grad_norm", max_grad_norm, f"is the older key of clip=norm, and clip={self.name} is set",
                              "set max_grad_norm=null, or clip=none")  # fmt: skip


@dataclass(frozen=True)
class Norm(_Clip):
    """`max_norm`: of the gradient of all parameters together, which is scaled down to it."""

    name: str = "norm"
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        positive("clip.max_norm", self.max_norm)

    def build(self, model: nn.Module, max_grad_norm: float | None) -> Clipping:
        from isobatch.clip.clipping import NormClipping

        return NormClipping(self.max_norm)


@dataclass(frozen=True)
class Value(_Clip):
    """`max_value`: of each element."""

    name: str = "value"
    max_value: float = 1.0

    def __post_init__(self) -> None:
        positive("clip.max_value", self.max_value)

    def build(self, model: nn.Module, max_grad_norm: float | None) -> Clipping:
        from isobatch.clip.clipping import ValueClipping

        return ValueClipping(self.max_value)


@dataclass(frozen=True)
class Agc(_Clip):
    """timm's adaptive gradient clipping (Brock et al. 2021): each output unit's gradient to `factor` times its weight's norm.

    Args:
        eps: least norm of a weight. head: the classifier's too (timm and the paper leave it alone).
    """

    name: str = "agc"
    factor: float = 0.01
    eps: float = 1e-3
    head: bool = False

    def __post_init__(self) -> None:
        positive("clip.factor", self.factor)
        within("clip.eps", self.eps, 0, 1)

    def build(self, model: nn.Module, max_grad_norm: float | None) -> Clipping:
        from isobatch.clip.clipping import AdaptiveClipping, head_of
        from isobatch.runtime.dtensor import in_parts

        if in_parts(model):
            raise ConfigError("clip.name", self.name, "works on whole weights, and here they are in parts",
                              "set clip=norm, or parallel=ddp")  # fmt: skip
        return AdaptiveClipping(self.factor, self.eps, set() if self.head else head_of(model))


TABLE: dict[str, Any] = {"none": NoClip, "norm": Norm, "value": Value, "agc": Agc}
MARKS = Marks()
