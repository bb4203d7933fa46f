"""Group `augment`: per-sample transforms and batch mixing. Every draw is bound to the sample or the shard by its seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NoAugment:
    name: str = "none"

    def sample_transform(self, info: Any) -> Any:
        """Per sample, on the image in 0..1 (C, H, W); None = none."""
        return None

    def batch_transform(self, info: Any, seed: int) -> Any:
        """Per micro batch, on the device (mixup); None = none. See Feed.prepare."""
        return None


TABLE: dict[str, Any] = {"none": NoAugment}
