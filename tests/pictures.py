"""Pictures for tests that read files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from PIL import Image


def photo(path: Path, size: tuple[int, int] = (96, 64), seed: int = 0, **save: Any) -> Path:
    """A smooth coloured picture, so that a rescaled copy is comparable pixel by pixel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = numpy.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=numpy.uint8)
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path, **save)
    return path
