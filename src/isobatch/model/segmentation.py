"""`model=smp`: networks with an answer for each pixel, from segmentation-models-pytorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isobatch.errors import ConfigError, kind_and_reason
from isobatch.marks import option
from isobatch.model.architectures import Model

if TYPE_CHECKING:
    from torch import nn

    from isobatch.data import DataInfo


@dataclass(frozen=True)
class Segmentation(Model):
    """A class for each pixel: segmentation-models-pytorch, whose encoders are timm's and torchvision's.

    Args:
        arch: its name (Unet, DeepLabV3Plus, FPN, ...); encoder: its name, of timm's with `tu-` before it.
        pretrained: the encoder begins with weights of ImageNet.
        kwargs: handed to create_model (encoder_depth, decoder_channels, ...).
    """

    name: str = "smp"
    arch: str = "Unet"
    encoder: str = "resnet18"
    pretrained: bool = option(False, resume="free")
    kwargs: dict[str, Any] = field(default_factory=dict)

    def build(self, info: DataInfo) -> nn.Module:
        try:
            import segmentation_models_pytorch as smp
        except ImportError:
            raise ConfigError("model.name", self.name, "needs segmentation-models-pytorch, which is not installed",
                              "pip install 'isobatch[segmentation]'") from None  # fmt: skip
        try:
            model: nn.Module = smp.create_model(self.arch, self.encoder, "imagenet" if self.pretrained else None,
                                                info.in_chans, max(1, info.answers), **self.kwargs)  # fmt: skip
        except Exception as error:  # whatever a model's own constructor raises
            raise ConfigError("model.arch", self.arch, f"could not be built with encoder {self.encoder} "
                              f"({kind_and_reason(error)})",
                              "choose another, or model.kwargs") from None  # fmt: skip
        return model
