"""What a model says of every evaluated sample (`task=evaluate`): by sample, by class, and which classes it takes for which."""

from __future__ import annotations

from isobatch.evaluate.answers import Answers
from isobatch.evaluate.classes import Confusion
from isobatch.evaluate.files import write

__all__ = ["Answers", "Confusion", "write"]
