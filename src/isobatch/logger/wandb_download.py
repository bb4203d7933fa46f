"""`python wandb_download.py ENTITY/PROJECT/NAME:ALIAS PARENT CHECKPOINTS FILE...`: that artifact into PARENT/vN; the last line
says so in JSON.

A script of its own that imports the standard library and wandb only. What is in PARENT/vN is complete: it comes there by one
rename. A checkpoint becomes a run folder, so that a training can go on from it: PARENT/vN/CHECKPOINTS/last, FILE... beside.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

CHECKPOINT = {"manifest.json", "state.pt"}


def fetch(artifact: Any, parent: Path, checkpoints: str, beside: Sequence[str]) -> str:
    version: str = artifact.version
    if not (version[:1] == "v" and version[1:].isdigit()):
        raise ValueError(f"its version is {version!r}")
    for name in artifact.manifest.entries:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise ValueError("it holds a path that leads out of it")
    target = parent / version
    if target.is_dir():
        return version
    parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{version}-", dir=parent))
    try:
        files, whole = part / "files", part / "whole"
        artifact.download(root=str(files))
        if {path.name for path in files.iterdir()} >= CHECKPOINT:
            (whole / checkpoints).mkdir(parents=True)
            for name in beside:
                if (files / name).is_file():
                    os.replace(files / name, whole / name)
            os.replace(files, whole / checkpoints / "last")
        else:
            os.replace(files, whole)
        label = {"artifact": f"{artifact.entity}/{artifact.project}/{artifact.name.partition(':')[0]}:{version}"}
        (whole / "artifact.json").write_text(json.dumps(label) + "\n", encoding="utf-8")
        try:
            os.replace(whole, target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return version


def main() -> None:
    name, parent, checkpoints, *beside = sys.argv[1:]
    try:
        import wandb

        found = wandb.Api(timeout=30).artifact(name)
        print(json.dumps({"version": fetch(found, Path(parent), checkpoints, beside)}))
    except Exception as error:
        print(json.dumps({"error": " ".join(str(error).split())[:300] or type(error).__name__}))


if __name__ == "__main__":
    main()
