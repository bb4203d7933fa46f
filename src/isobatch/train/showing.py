"""What the model says of some evaluated images, to the logger that wants to know."""

from __future__ import annotations

from isobatch.data import DataInfo
from isobatch.logger.predictions import Predictions
from isobatch.train.loop import Loop


class Showing:
    """Called by all ranks alike: the main rank's logger decides how many, and all see them in one forward.

    Args:
        loop: whose evaluations are followed, if the logger wants that.
    """

    def __init__(self, loop: Loop, info: DataInfo):
        self.loop, self.info, self.shown = loop, info, -1
        images = len(info.shape) == 3 and info.num_classes
        self.count = loop.ranks.agree(loop.logger.wants_predictions) if images else 0
        if self.count and loop.ranks.agree(loop.logger.wants_each):
            loop.evaluated = self

    def __call__(self) -> None:
        """Once a step at most."""
        loop, state = self.loop, self.loop.state
        if not self.count or self.shown == state.step:
            return
        self.shown = state.step
        first = loop.evaluator.first(state.evaluated_model(loop.parts.device), self.count)
        if first is None:  # not one image and one label of a sample
            return
        found = Predictions(*first, self.info.class_names, self.info.mean, self.info.std)
        loop.logger.predictions({"step": state.step, "samples": state.samples}, found)
