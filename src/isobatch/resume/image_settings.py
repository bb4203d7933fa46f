"""What group `data` leaves open of images (size, crop, interpolation, mean, std), settled by the weights that it will meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.checkpoint import reading
from isobatch.resume import signature, weights_know

if TYPE_CHECKING:
    from isobatch.checkpoint.reading import Saved
    from isobatch.config import Config
    from isobatch.data.base import DataOptions


def settled(config: Config, run: Saved | None, for_evaluation: bool,
            on_main: Callable[[Callable[[], Any]], Any]) -> tuple[DataOptions, list[str]]:  # fmt: skip
    """(the options, lines for a person): as the run that goes on knows images, else as the first weights do.

    Args:
        run: that goes on. for_evaluation: no training follows. on_main: what a function finds on the main rank.
    """
    options = config.data
    settle: Any = getattr(options, "settled", None)
    if settle is None:
        return options, []
    known: weights_know.Known | None = on_main(lambda: _known(config, run, for_evaluation))
    if known is None:
        return settle({}), []
    taken: DataOptions = settle(known.settings())
    found = {key: value for key in known.settings() if getattr(options, key) is None
             and (value := getattr(taken, key)) is not None}  # fmt: skip
    listed = ", ".join(f"{key} {signature.shown(value)}" for key, value in found.items())
    said = [f"images as the weights know them ({known.origin}): {listed}"] if found else []
    return taken, [*said, *(known.told if found and run is None else ())]


def _known(config: Config, run: Saved | None, for_evaluation: bool) -> weights_know.Known | None:
    if run is None and config.resume is not None:  # from the seed on (step-0), the run's own all the same
        run = reading.read(Path(config.resume))
    if run is not None:
        return weights_know.of_saved(run.state["plan"], run.run)
    return weights_know.of(config.model, for_evaluation)
