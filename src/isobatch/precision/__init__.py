"""Group `precision`: apex's ladder on plain torch."""

from typing import Any

from isobatch.marks import Marks
from isobatch.precision.levels import Autocast, Full, MasterWeights, PureHalf

TABLE: dict[str, Any] = {"full": Full, "autocast": Autocast, "master": MasterWeights, "half": PureHalf}
MARKS = Marks(resume="identity", speed=True)
