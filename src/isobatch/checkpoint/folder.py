"""`checkpoints/` on disk: what is complete, and how something becomes complete in one move.

    step-N/ last/ best/   each with state.pt, model.safetensors and manifest.json (sizes and SHA-256 of the other two)
    tmp/                  work in progress; never read as a checkpoint, at most one

A name inside a manifest is only ever compared with the names that belong there; it never becomes a path.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.run_folder.reading import Unreadable, open_file, read_json

STATE, WEIGHTS, MANIFEST, TMP = "state.pt", "model.safetensors", "manifest.json", "tmp"
FORMAT = 1
NAME = re.compile(r"last|best|step-[0-9]{1,15}")


class Damaged(Exception):
    """A checkpoint that is not what was saved; the text says why."""


@dataclass(frozen=True)
class Entry:
    """A complete checkpoint."""

    path: Path
    step: int


class HashedFile:
    """A file to write to, whose SHA-256 is known at the end without reading it again."""

    def __init__(self, path: Path):
        self.file, self.hash, self.size = path.open("wb"), hashlib.sha256(), 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self.hash.update(data)
        self.size += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        self.file.flush()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        """Force it to the disk, unless writing it has failed already; then it is raised why, which torch does not tell."""
        if self.failure is not None:
            with suppress(OSError):
                self.file.close()
            raise self.failure
        with suppress(OSError) if kind else nullcontext(), self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    def entry(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {"bytes": self.size, "sha256": self.hash.hexdigest()}


class CheckpointFolder:
    """The writing side; one process writes."""

    def __init__(self, path: Path):
        self.path, self.tmp = path, path / TMP

    def begin(self) -> Path:
        """An empty folder to put files into."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.recover()
        shutil.rmtree(self.tmp, ignore_errors=True)
        part = self.tmp / "new"
        part.mkdir(parents=True)
        return part

    def recover(self) -> None:
        """Finish a move of `last` or `best` that a kill interrupted between its two renames."""
        for name in ("last", "best"):
            if not (self.path / name).exists() and (self.tmp / name / MANIFEST).exists():
                os.replace(self.tmp / name, self.path / name)

    def publish(self, part: Path, step: int, files: dict[str, Any], names: list[str]) -> None:
        """Make `part` the checkpoint `step-<step>`, and each of `names` (last, best) another name for its files."""
        with HashedFile(part / MANIFEST) as manifest:
            manifest.write(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=2).encode() + b"\n")
        fsync_folder(part)
        numbered = f"step-{step}"
        self._place(part, numbered)
        for name in names:
            twin = self.tmp / name
            link_or_copy(self.path / numbered, twin)
            self._place(twin, name)

    def _place(self, part: Path, name: str) -> None:
        """`part` under its name; what had the name before goes only when the new one is ready."""
        target, old = self.path / name, self.tmp / f"old-{name}"
        if target.exists():
            os.replace(target, old)
        os.replace(part, target)
        fsync_folder(self.path)
        shutil.rmtree(old, ignore_errors=True)

    def finish(self, step: int, keep: int, kept: frozenset[int] = frozenset()) -> None:
        """Remove the work folder, and of the checkpoints numbered up to `step` all but the newest `keep` and `kept`."""
        shutil.rmtree(self.tmp, ignore_errors=True)
        numbers = sorted(int(p.name[5:]) for p in self.path.glob("step-*") if NAME.fullmatch(p.name))
        for number in [n for n in numbers if n <= step][:-keep]:
            if number in kept:
                continue
            shutil.rmtree(self.path / f"step-{number}", ignore_errors=True)

    def put_aside(self) -> Path | None:
        """Rename a folder of earlier checkpoints, for a run that starts over in the same place."""
        if not self.path.exists():
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}-old-{number}")).exists():
            number += 1
        os.replace(self.path, aside)
        return aside


def link_or_copy(source: Path, target: Path, copy: Callable[..., Any] = shutil.copyfile) -> None:
    """A second name for a checkpoint's files: hard links where the file system has them. The manifest comes last."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in (STATE, WEIGHTS, MANIFEST):
        if not (source / name).is_file():
            continue
        try:
            os.link(source / name, target / name)
        except OSError:
            copy(source / name, target / name)
            with (target / name).open("rb") as file:
                os.fsync(file.fileno())
    fsync_folder(target)


def fsync_folder(path: Path) -> None:
    with suppress(OSError):  # some network file systems have no such thing
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked for its form.

    Raises:
        Damaged: none there, or not one of ours.
    """
    try:
        data = read_json(path, MANIFEST)
        step, files = data["step"], data["files"]
        sizes = [files[name]["bytes"] for name in (STATE, WEIGHTS)]
        sums = [files[name]["sha256"] for name in (STATE, WEIGHTS)]
    except Unreadable as problem:
        raise Damaged(f"{MANIFEST} {problem}") from None
    except (KeyError, TypeError) as error:
        raise Damaged(f"{MANIFEST} is incomplete ({type(error).__name__})") from None
    if data.get("format") != FORMAT:
        raise Damaged(f"{MANIFEST} has format {str(data.get('format'))[:20]}, not {FORMAT}")
    if set(files) != {STATE, WEIGHTS}:
        raise Damaged(f"{MANIFEST} lists files that do not belong to a checkpoint")
    if not all(type(n) is int and n >= 0 for n in (step, *sizes)) or not all(isinstance(s, str) for s in sums):
        raise Damaged(f"{MANIFEST} has values of the wrong type")
    return dict(data)


def verify(path: Path) -> Entry:
    """Compare every byte with the manifest.

    Raises:
        Damaged: with the reason.
    """
    manifest = manifest_of(path)
    for name in (STATE, WEIGHTS):
        expected = manifest["files"][name]
        try:
            with open_file(path, name) as opened:
                size = os.fstat(opened.fileno()).st_size
                if size != expected["bytes"]:
                    raise Damaged(f"{name} has {size} bytes, not {expected['bytes']}")
                found = hashlib.file_digest(opened, "sha256").hexdigest()
        except Unreadable as problem:
            raise Damaged(f"{name} {problem}") from None
        except OSError as error:
            raise Damaged(f"{name} cannot be read ({error.strerror})") from None
        if found != expected["sha256"]:
            raise Damaged(f"{name} does not have the checksum that it was saved with")
    return Entry(path, manifest["step"])


def names(path: Path) -> list[str]:
    """Checkpoints in a folder: `last` first, then by step from the newest; complete or not."""
    found = [p.name for p in path.iterdir() if NAME.fullmatch(p.name)] if path.is_dir() else []

    def order(name: str) -> tuple[int, int]:
        if name.startswith("step-"):
            return (1, -int(name[5:]))
        try:
            return (int(name != "last"), -manifest_of(path / name)["step"])
        except Damaged:
            return (int(name != "last"), 0)

    return sorted(found, key=order)
