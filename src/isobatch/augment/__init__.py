"""Group `augment`: per-sample transforms and batch mixing."""

from typing import Any

from isobatch.augment.options import AugMix, AutoAugment, NoAugment, RandAugment, Simple
from isobatch.marks import Marks

TABLE: dict[str, Any] = {
    "none": NoAugment,
    "simple": Simple,
    "randaugment": RandAugment,
    "autoaugment": AutoAugment,
    "augmix": AugMix,
}
MARKS = Marks(speed=True)
