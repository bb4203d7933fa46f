"""What a model says of every evaluated sample (`task=evaluate`): by sample, by class, and which classes it takes for which."""

from __future__ import annotations

from isobatch.predictions.answers import Answers
from isobatch.predictions.classes import Classes
from isobatch.predictions.files import write

__all__ = ["Answers", "Classes", "write"]
