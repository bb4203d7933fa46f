"""`task=predict`: what a trained model makes of samples without labels (predicting.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.errors import ConfigError
from isobatch.tasks.base import Task, needs_weights

if TYPE_CHECKING:
    from isobatch.config import Config
    from isobatch.runtime.distributed import Ranks


class Predict(Task):
    name = "predict"
    built = "model"
    reads_data = False  # of predict.path, or of the data set's one split
    logs = False

    def check(self, config: Config) -> None:
        from isobatch.data import unlabelled

        needs_weights(self, config)
        config.writer.check()
        if config.predict.path is not None:
            unlabelled.check(config.predict.path)
        elif (check := getattr(config.data, "check", None)) is not None:
            try:
                check()
            except ConfigError as refusal:
                raise ConfigError("predict.path", None, f"nothing to predict for ({refusal})",
                                  "set predict.path to a folder of images, a csv or a tar") from None  # fmt: skip

    def apply(self, config: Config, run_dir: Path, ranks: Ranks) -> None:
        from isobatch.tasks.predicting import predict

        predict(config, run_dir, ranks)
