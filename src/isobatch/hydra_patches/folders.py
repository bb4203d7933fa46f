"""Run folders that no other launch shares."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from isobatch.run_folder import layout


class Stamp:
    """Resolver `${stamp:outputs}`: outputs/<date>/<time>, once per launch and for no other launch."""

    def __init__(self) -> None:
        self.claiming = False  # only a launch that will run jobs makes the folder; --cfg and compose() do not
        self._paths: dict[str, str] = {}
        self.made: list[Path] = []

    def __call__(self, parent: str) -> str:
        if parent not in self._paths:
            self._paths[parent] = self._agreed(parent)
        return self._paths[parent]

    def _agreed(self, parent: str) -> str:
        """Under torchrun a restart gets the first attempt's folder back."""
        if not self.claiming or "TORCHELASTIC_RUN_ID" not in os.environ:
            return self._new(parent)
        from isobatch.launch.torchrun import run_folder

        return run_folder(parent, self._new)

    def _new(self, parent: str) -> str:
        path = Path(parent, datetime.now().strftime("%Y-%m-%d/%H-%M-%S"))
        if not self.claiming:
            return str(path)
        for folder in (Path(parent), path.parent):
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
                self.made.append(folder.absolute())
        for number in count(1):
            candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)  # another launch may just have released it
                candidate.mkdir()
            except FileExistsError:  # another launch of this second
                continue
            self.made.append(candidate.absolute())
            return str(candidate)
        raise AssertionError("unreachable")

    def release(self, used: Path | None = None) -> None:
        """Remove the folders that were made for nothing: composing asks for outputs/ and multirun/ alike."""
        for folder in reversed(self.made):
            if used is None or not used.is_relative_to(folder):
                with suppress(OSError):  # somebody else works in it
                    if [file.name for file in folder.iterdir()] == [layout.MULTIRUN]:  # the sweeper's note of the command
                        (folder / layout.MULTIRUN).unlink()
                    folder.rmdir()


STAMP = Stamp()
