"""What an option says of itself: what a changed value means to a resumed run, and whether it is a path.

The mark stands where the option stands. A group states in `MARKS`, beside its table, what holds for each of its options;
one that differs says so in its own metadata:

    root: str | None = option(None, resume="free", path="file")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Resume = Literal["contract", "identity", "free"]
KEY = "isobatch"


@dataclass(frozen=True)
class Marks:
    """
    Args:
        resume: what a changed value means to a run that is resumed. `contract`: another training, refused unless
            allow_contract_change. `identity`: the same training, but other bits, so the run says that the promise drops.
            `free`: where and how, and no bit of it.
        path: `file`: a file or folder, typed relative to where it is typed; `maybe`: one only if it is there, else a name;
            a tuple: such keys of a mapping.
        speed: a training's samples per second depend on it.
    """

    resume: Resume = "contract"
    path: Literal["", "file", "maybe"] | tuple[str, ...] = ""
    speed: bool = False


def option(default: Any = dataclasses.MISSING, *, factory: Callable[[], Any] | None = None, **marks: Any) -> Any:
    """A dataclass field with marks of its own; `marks` as of Marks, and what is left out is the group's."""
    Marks(**marks)  # refuses what is no mark
    metadata = {KEY: marks}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def of(field: dataclasses.Field[Any], group: Marks) -> Marks:
    """The marks of an option of a group."""
    return dataclasses.replace(group, **field.metadata.get(KEY, {}))


def options(cls: type, group: Marks) -> Iterator[tuple[str, Marks]]:
    """(name, marks) of every option of an options dataclass but `name`, the choice itself."""
    for field in dataclasses.fields(cls):
        if field.name != "name":
            yield field.name, of(field, group)
