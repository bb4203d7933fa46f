"""Group `model`: timm architectures by name, and two small models of our own."""

from typing import Any

from isobatch.marks import Marks
from isobatch.model.architectures import COMPILE, MLP, Linear, Model, Timm

__all__ = ["COMPILE", "MARKS", "MLP", "TABLE", "Linear", "Model", "Timm"]

TABLE: dict[str, Any] = {"timm": Timm, "linear": Linear, "mlp": MLP}
MARKS = Marks(speed=True)
