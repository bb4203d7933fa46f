"""From a folder that anybody may have written to plain, checked data. Nothing in it is ever run."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.checkpoint import archive, averaging
from isobatch.checkpoint.folder import MANIFEST, STATE, Damaged, names, verify
from isobatch.errors import ConfigError, reason
from isobatch.run_folder import layout

log = logging.getLogger("isobatch")

SECTIONS = {"model": dict, "optimizer": dict, "scaler": dict, "reducer": dict, "counters": dict,
            "config": dict, "plan": dict, "identity": dict}  # fmt: skip
COUNTERS = ("step", "update", "skipped_steps", "samples", "evaluated")
OPTIONAL = {"ema", "format"}
MAX_DEPTH = 32
MAX_DAMAGED = 20  # checkpoints that are tried; a folder of ours has checkpoint.keep of them, and two more names


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole.

    `state` is plain data on the CPU: that of TrainState.state_dict, and the run's `config`, `plan` and `identity`.
    """

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def run(self) -> Path:
        """The run folder it belongs to."""
        return self.path.parent.parent


def load(run: str | Path, which: str = "last") -> dict[str, Any]:
    """The saved state of a run folder, as plain data on the CPU. See `read`."""
    return read(Path(run), which).state


def read(run: Path, which: str = "last") -> Saved:
    """A checkpoint of a run folder; `run` may also be the folder of one checkpoint.

    `last` means the newest whole one: a damaged one is named in a warning, and the one before it is used. `mean` is the mean
    of the weights of all numbered ones (averaging.py).

    Raises:
        ConfigError: no such run, no (whole) checkpoint in it, or contents that are not a training state.
    """
    if (run / MANIFEST).is_file():
        run, which = run.absolute().parent.parent, run.name
    folder = run / layout.CHECKPOINTS
    if which == "mean":
        return _mean(folder)
    there = [name for name in names(folder) if which in ("last", name)]
    if not there:
        others = f"; there are {', '.join(names(folder))}" if names(folder) else ""
        raise ConfigError("resume", run, f"holds no checkpoint {which if others else ''}".rstrip() + others,
                          "set resume to a run folder with checkpoints, checkpoint.load to one of them")  # fmt: skip
    damaged: list[Path] = []
    for name in there:
        path = folder / name
        if any(_same_files(path, other) for other in damaged):
            continue
        try:
            return _open(path)
        except Damaged as problem:
            damaged.append(path)
            if len(damaged) >= MAX_DAMAGED:
                break
            if which == "last":
                log.warning("checkpoint %s is damaged (%s); the one before it is used", path, problem)
            else:
                raise ConfigError("checkpoint.load", which, f"{path} is damaged ({problem})",
                                  "set checkpoint.load=last: it takes the newest whole one") from None  # fmt: skip
    raise ConfigError("resume", run, "none of its checkpoints is whole",
                      "use another run folder, or checkpoint.resume=never to start over")  # fmt: skip


def check_use(config: Any, trains: bool) -> None:
    """Refuse to go on training from what is no state of a training."""
    if trains and config.resume is not None and config.checkpoint.load == "mean":
        raise ConfigError("checkpoint.load", "mean", "is of weights alone, and a training goes on with all of its state",
                          "set checkpoint.load=last; or export the mean, and begin with model.checkpoint_path")  # fmt: skip


def _mean(folder: Path) -> Saved:
    """The newest numbered checkpoint, with the mean of the weights of all of them."""
    found: list[Path] = []

    def states() -> Iterator[dict[str, Any]]:
        for name in names(folder):
            if name.startswith("step-"):
                try:
                    saved = _open(folder / name)
                except Damaged as problem:
                    log.warning("checkpoint %s is damaged (%s); the mean is without it", folder / name, problem)
                    continue
                found.append(saved.path)
                yield saved.state

    try:
        state, count = averaging.mean(states())
    except (StopIteration, Damaged) as problem:
        state, count, why = {}, 0, str(problem) or "there is no numbered checkpoint"
    else:
        why = f"there is one numbered checkpoint, {found[0].name}"
    if count < 2:
        raise ConfigError("checkpoint.load", "mean", f"{folder.parent}: {why}",
                          "train with checkpoint.every=1ep checkpoint.keep=5, say, or set checkpoint.load=last")  # fmt: skip
    log.info("checkpoint.load=mean: the mean of %d checkpoints, the newest %s", count, found[0])
    return Saved(found[0].with_name("mean"), int(state["counters"]["step"]), state)


def exists(run: Path) -> bool:
    """Whether a run folder has checkpoints, damaged ones included."""
    return bool(names(run / layout.CHECKPOINTS))


def _same_files(a: Path, b: Path) -> bool:
    try:
        return os.path.samefile(a / STATE, b / STATE)
    except OSError:
        return False


def _open(path: Path) -> Saved:
    entry = verify(path)
    state = safe_load(path / STATE)
    check_form(state)
    if state["counters"]["step"] != entry.step:
        raise Damaged(f"it says step {state['counters']['step']}, but its manifest says {entry.step}")
    return Saved(path, entry.step, state)


def safe_load(path: Path) -> Any:
    """torch.load in safe mode, of a file that takes hardly more memory than it has bytes (see archive.py).

    Raises:
        Damaged: it cannot be read that way.
    """
    import torch

    archive.check(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise Damaged(f"torch's safe mode cannot read {path.name} ({reason(error, 120)})") from None


def check_form(state: Any) -> None:
    """Raise Damaged unless `state` has the form of a training state: plain containers, numbers, text, dense tensors."""
    if not isinstance(state, dict):
        raise Damaged("it holds no training state")
    version = state.get("format", 0)  # 0: from before there was one
    if type(version) is not int or version < 0:
        raise Damaged("its format is no number")
    if version > layout.FORMAT:
        raise Damaged(f"a later release wrote it, in format {version}, and this one knows {layout.FORMAT}: update isobatch")
    for section, kind in SECTIONS.items():
        if not isinstance(state.get(section), kind):
            raise Damaged(f"it has no {section}")
    if not isinstance(state.get("ema"), dict | None):
        raise Damaged("its ema is no state")
    if unknown := state.keys() - SECTIONS.keys() - OPTIONAL:
        raise Damaged(f"it has a section {str(min(unknown, key=str))[:40]}, which no training state has")
    _plain(state, "state", 0, seen=set())
    for section in ("config", "plan", "identity", "counters"):
        _plain(state[section], section, 0, set(), tensors=False)
    counters = state["counters"]
    for name in COUNTERS:
        if type(counters.get(name)) is not int or not 0 <= counters[name] < 2**53:
            raise Damaged(f"its {name} is no count")
    best, run_id = counters.get("best"), counters.get("logger_run_id")
    if not isinstance(best, dict) or not all(
        isinstance(k, str) and isinstance(v, dict) and set(v) == {"value", "step"}
        and all(type(n) in (int, float) for n in v.values()) for k, v in best.items()
    ):  # fmt: skip
        raise Damaged("its best metrics are none")
    # a logger makes a folder of this name
    if run_id is not None and not (isinstance(run_id, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,128}", run_id)):
        raise Damaged("its logger run id is none")


def _plain(value: Any, where: str, depth: int, seen: set[int], tensors: bool = True) -> None:
    """Each container and each tensor's data once: a list that stands in two places doubles with every level."""
    import torch

    where = where[-60:]
    if depth > MAX_DEPTH:
        raise Damaged(f"{where} is nested too deeply")
    if isinstance(value, dict | list | tuple) and value:
        if id(value) in seen:
            raise Damaged(f"{where} stands in two places")
        seen.add(id(value))
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str | int):
                raise Damaged(f"{where} has a key that is neither text nor a number")
            _plain(inner, f"{where}.{key}", depth + 1, seen, tensors)
    elif isinstance(value, list | tuple):
        for inner in value:
            _plain(inner, where, depth + 1, seen, tensors)
    elif isinstance(value, torch.Tensor) and tensors:
        dense = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
        # a tensor that claims more elements than it stores would fill the memory when it is copied
        if not dense or value.untyped_storage().nbytes() < value.numel() * value.element_size():
            raise Damaged(f"{where} is no dense tensor")
        if value.numel() and value.untyped_storage().data_ptr() in seen:
            raise Damaged(f"{where} has the data of another tensor")
        seen.add(value.untyped_storage().data_ptr())
    elif not isinstance(value, str | int | float | bool | None):
        raise Damaged(f"{where} is a {type(value).__name__}, which is not plain data")


def chosen(saved: Saved, options: Any) -> str:
    """`ema` or `raw`: which of its weights group `checkpoint` asks for. Of `best`, `auto` takes those that made it the best."""
    if options.weights == "raw" or not saved.state["ema"]:
        return "raw"
    found_better = options.load == "best" and saved.state["counters"].get("better") == "raw"
    return "raw" if options.weights == "auto" and found_better else "ema"


def no_ema(saved: Saved) -> ConfigError:
    return ConfigError("checkpoint.weights", "ema", f"{saved.path} holds no average of the weights",
                       "set checkpoint.weights=raw, or train with ema=ema")  # fmt: skip
