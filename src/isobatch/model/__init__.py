"""Group `model`: timm architectures by name, segmentation-models-pytorch's, and two small models of our own."""

from typing import Any

from isobatch.marks import Marks
from isobatch.model.architectures import COMPILE, MLP, Linear, Model, TimmModel
from isobatch.model.segmentation import Segmentation

__all__ = ["COMPILE", "MARKS", "MLP", "TABLE", "Linear", "Model", "Segmentation", "TimmModel"]

TABLE: dict[str, Any] = {"timm": TimmModel, "smp": Segmentation, "linear": Linear, "mlp": MLP}
MARKS = Marks(speed=True)
