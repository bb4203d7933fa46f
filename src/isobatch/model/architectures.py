"""Group `model`: timm architectures by name, and two small models of our own."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.checks import choice, positive, within
from isobatch.errors import ConfigError
from isobatch.marks import option

if TYPE_CHECKING:
    from torch import nn

    from isobatch.data import DataInfo

BATCH_NORM = ("shard", "sync", "frozen")
# the top-level key `compile`: on, and torch.compile's modes
COMPILE = (False, True, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Model:
    """What all models share.

    Args:
        batch_norm: `shard` (statistics of a shard; running statistics averaged over the window), `sync` (over the
            whole micro step of all ranks, CUDA only), `frozen` (as loaded).
        table: show the layers with the plan: output, weights, operations.
        freeze: names of parts that keep their weights (see freezing.py); `backbone` = all but the classifier.
    """

    name: str = ""
    batch_norm: str = "shard"
    freeze: list[str] = field(default_factory=list)
    table: bool = option(False, resume="free")

    def __post_init__(self) -> None:
        choice("model.batch_norm", self.batch_norm, BATCH_NORM)

    @property
    def first_weights(self) -> str | None:
        """Trained weights that it begins with, in words; None = they are drawn."""
        return None

    def build(self, info: DataInfo) -> nn.Module:
        """The model for this data, on the CPU, its weights drawn from the global generator."""
        raise AssertionError("a model defines build")


@dataclass(frozen=True)
class TimmModel(Model):
    """Any architecture that timm knows; classes and input channels come from the data.

    Args:
        arch: timm's name, with a pretrained tag if wanted (`resnet18.a1_in1k`).
        checkpoint_path: a file of weights (safetensors, or torch's, in its safe mode), a run folder of this program
            (its best, else its last checkpoint) or an exported one. A classifier for other classes starts anew.
        small_stem: for images of about 32 px: a ResNet begins with a 3x3 convolution instead of a 7x7 with stride 2 and
            a max pool (He et al. 2016, section 4.2).
        kwargs: handed to timm.create_model (img_size, patch_size, ...).
        head_init_scale, head_init_bias: the classifier's first weights times a factor, and what its bias begins with.
    """

    name: str = "timm"
    arch: str = "resnet18"
    pretrained: bool = option(False, resume="free")
    checkpoint_path: str | None = option(None, resume="free", path="file")
    drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    grad_checkpointing: bool = option(False, resume="free")
    small_stem: bool = False
    head_init_scale: float | None = None
    head_init_bias: float | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    imports: ClassVar[tuple[str, ...]] = ("isobatch.runtime.timm_import",)  # what takes seconds: see launch/spawn.py

    def __post_init__(self) -> None:
        super().__post_init__()
        within("model.drop_rate", self.drop_rate, 0, 1)
        within("model.drop_path_rate", self.drop_path_rate, 0, 1)
        for key, least in (("head_init_scale", 0), ("head_init_bias", -1e6)):
            if getattr(self, key) is not None:
                within(f"model.{key}", getattr(self, key), least, 1e6)

    @property
    def first_weights(self) -> str | None:
        return self.checkpoint_path or (f"timm's {self.arch}" if self.pretrained else None)

    def build(self, info: DataInfo) -> nn.Module:
        from isobatch.runtime.timm_import import timm

        base = self.arch.split(".")[0]
        if not timm.is_model(base):
            near = difflib.get_close_matches(base, timm.list_models(), n=3, cutoff=0.4) or ["resnet18"]
            raise ConfigError("model.arch", self.arch, "timm has no such architecture", f"try {', '.join(near)}")
        if info.answers < 1:
            raise ConfigError("model.name", self.name, f"a classifier needs classes, and data={info.name} has none",
                              "set model=linear or model=mlp")  # fmt: skip
        rates: dict[str, Any] = {k: v for k, v in (("drop_rate", self.drop_rate), ("drop_path_rate", self.drop_path_rate)) if v}
        try:
            model = timm.create_model(
                self.arch, pretrained=self.pretrained, num_classes=info.answers, in_chans=info.in_chans,
                **rates, **self.kwargs,
            )  # fmt: skip
        except Exception as error:  # whatever a model's own constructor raises
            # the default model brings kwargs of its own, which stay when only `arch` is typed anew
            way_out = f"set model=timm model.arch={self.arch} (model.kwargs is {self.kwargs})" if self.kwargs else \
                "set model.pretrained=false, with a file of weights as model.checkpoint_path" if self.pretrained else \
                "check model.drop_rate and model.drop_path_rate"  # fmt: skip
            raise ConfigError("model.arch", self.arch, f"timm could not build it ({type(error).__name__}: {error})",
                              way_out) from None  # fmt: skip
        if self.head_init_scale is not None or self.head_init_bias is not None:
            from isobatch.model.freezing import begin_head

            begin_head(model, self.head_init_scale, self.head_init_bias)
        if self.small_stem:
            from isobatch.resume.first_weights import small_stem

            small_stem(model, self.arch)
        if self.checkpoint_path:
            from isobatch.resume.first_weights import load_into

            load_into(model, self.checkpoint_path, info)
        elif self.pretrained:
            from isobatch.resume.first_weights import warn_of_normalization
            from isobatch.resume.signature import Signature

            warn_of_normalization(Signature.of_pretrained(model), info)
        if self.grad_checkpointing:
            try:
                model.set_grad_checkpointing(True)  # type: ignore[operator]
            except Exception as error:  # an assertion, a missing method, or whatever else says that it has none
                raise ConfigError("model.grad_checkpointing", True, f"{self.arch} has no gradient checkpointing ({error})",
                                  "set model.grad_checkpointing=false") from None  # fmt: skip
        return model


@dataclass(frozen=True)
class Linear(Model):
    """One linear layer on flat inputs: features -> `outputs` (null: the number of classes, or 1 without classes).

    `init`: `default` (torch's), or `ones` / `zeros` for experiments that are worked out by hand.
    """

    name: str = "linear"
    outputs: int | None = None
    bias: bool = True
    init: str = "default"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outputs is not None:
            positive("model.outputs", self.outputs)
        choice("model.init", self.init, ("default", "ones", "zeros"))

    def build(self, info: DataInfo) -> nn.Module:
        from torch import nn

        layer = nn.Linear(info.features, self.outputs or max(1, info.answers), bias=self.bias)
        if self.init != "default":
            for parameter in layer.parameters():
                nn.init.constant_(parameter, float(self.init == "ones"))
        return nn.Sequential(nn.Flatten(), layer)


@dataclass(frozen=True)
class MLP(Model):
    """`depth` hidden layers of `width` units with ReLU on flat inputs; optional batch norm and dropout."""

    name: str = "mlp"
    width: int = 128
    depth: int = 2
    outputs: int | None = None
    norm: bool = False
    drop_rate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("model.width", self.width)
        positive("model.depth", self.depth)
        within("model.drop_rate", self.drop_rate, 0, 1)

    def build(self, info: DataInfo) -> nn.Module:
        from torch import nn

        layers: list[nn.Module] = [nn.Flatten()]
        width = info.features
        for _ in range(self.depth):
            layers.append(nn.Linear(width, self.width))
            if self.norm:
                layers.append(nn.BatchNorm1d(self.width))
            layers.append(nn.ReLU())
            if self.drop_rate:
                layers.append(nn.Dropout(self.drop_rate))
            width = self.width
        return nn.Sequential(*layers, nn.Linear(width, self.outputs or max(1, info.answers)))
