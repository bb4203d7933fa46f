"""The training: the loop over windows, the step, and all state that changes.

`isobatch.train([...])` is what a person calls in Python. Since this room has the same name, and the import of any file in it
makes `isobatch.train` the room, the room itself can be called.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isobatch.api import Result


class _Room(ModuleType):
    def __call__(self, overrides: Iterable[str] = ()) -> Result:
        from isobatch import api

        return api.train(overrides)


sys.modules[__name__].__class__ = _Room
