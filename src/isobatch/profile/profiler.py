"""What a loop asks of a profiler; this one looks at nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any


class Profiler:
    """Around a training: `with profiler: ...`."""

    def windows(self, windows: Iterator[Any], state: Any, parts: Any) -> Iterator[Any]:
        """The same windows, to the training that goes through them with `state` and `parts`; a step has ended when the next
        one is asked for."""
        return windows

    def row(self) -> dict[str, float]:
        """What a logged row gets beside its own."""
        return {}

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """The training is over, or has failed with `error`."""
