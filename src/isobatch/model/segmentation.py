"""`model=smp`: networks with an answer for each pixel, from segmentation-models-pytorch."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isobatch.errors import ConfigError, kind_and_reason
from isobatch.marks import option
from isobatch.model.architectures import Model

if TYPE_CHECKING:
    from torch import nn

    from isobatch.data import DataInfo


RENAMED = ("decoder_use_batchnorm", "psp_use_batchnorm", "upscale_mode")  # still read, though in no signature


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
        self._refuse_unread(type(model))
        return model

    def _refuse_unread(self, network: type) -> None:
        """What a network does not know it hands to the encoder, and only timm's (`tu-`) read it: others drop it."""
        read = [name for name in inspect.signature(network).parameters if name != "kwargs"]
        unread = [name for name in self.kwargs if name not in (*read, *RENAMED)]
        if unread and not self.encoder.startswith(("tu-", "timm-")):
            own = [name for name in read if name not in ("encoder_name", "encoder_weights", "in_channels", "classes")]
            raise ConfigError(
                "model.kwargs", self.kwargs, f"{self.arch} with encoder {self.encoder} does not read {', '.join(unread)}",
                f"it reads {', '.join(own)}",
            )  # fmt: skip
