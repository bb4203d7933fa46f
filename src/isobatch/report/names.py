"""What a person calls the jobs of a sweep: by the settings in which they differ, "lr 0.01, accumulation 3"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from isobatch.report.cells import show
from isobatch.report.config_columns import Cell
from isobatch.report.read import RunRecord, one_line

_PARTS, _LONGEST = 4, 64  # of a name: settings, characters
# what a hardware plan chooses: jobs that differ in nothing else are one training on several plans
PLAN = {"plan", "parallel", "accumulation", "precision", "reduction", "compile", "threads", "channels_last", "deterministic"}


def typed(run: RunRecord) -> dict[str, str]:
    """Setting -> what was typed for the job; Hydra's own are left out."""
    words = (word.lstrip("+~").partition("=") for word in run.overrides)
    return {one_line(key.partition("@")[0].replace("/", ".")): one_line(value) for key, _, value in words
            if not key.startswith("hydra.")}  # fmt: skip


def swept(runs: Sequence[RunRecord], keys: Sequence[str]) -> tuple[list[str], list[dict[str, Cell]]]:
    """(columns of the settings that were swept, values that no config key shows).

    keys: config keys whose values differ. `optimizer=sgd,adamw` may differ in many keys and in none by its name: it is a
    column of its own, with what was typed.
    """
    words = [typed(run) for run in runs]
    names = dict.fromkeys(name for job in words for name in job)
    columns: list[str] = []
    extra: list[dict[str, Cell]] = [{} for _ in runs]
    for name in (name for name in names if len({job.get(name) for job in words}) > 1):
        below = [key for key in keys if key.startswith(f"{name}.")]
        own = next((key for key in (name, f"{name}.name", *(below if len(below) == 1 else ())) if key in keys), None)
        if own is None and (below or name in ("experiment", "plan")):
            own = name
            for job, cells in zip(words, extra, strict=True):
                cells[name] = job.get(name)
        if own is not None and own not in columns:
            columns.append(own)
            for run, job, cells in zip(runs, words, extra, strict=True):
                if not run.config and name in job:  # it was never begun: what was typed is all there is
                    cells[own] = job[name]
    return columns, extra


def short(key: str, keys: Sequence[str]) -> str:
    """`lr` for optimizer.lr, unless another of `keys` ends like it; a group's choice goes by the group."""
    if key.endswith(".name") or key == "accumulation.steps":
        return key.rpartition(".")[0]
    leaf = key.rpartition(".")[2]
    return leaf if sum(other.rpartition(".")[2] == leaf for other in keys) < 2 else key


def job_names(runs: Sequence[RunRecord], rows: Sequence[Mapping[str, Cell]], columns: Sequence[str]) -> list[str]:
    """One name per run, all different: the columns' values; the job's number where they say nothing."""
    found = []
    for run, row in zip(runs, rows, strict=True):
        parts = [f"{short(key, columns)} {show(row[key])}" for key in columns[:_PARTS] if row.get(key) is not None]
        text = ", ".join(parts) if len(runs) > 1 else ""
        text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
        found.append(text or f"job {run.job}")
    times = Counter(found)
    return [name if times[name] == 1 else f"{name} (job {run.job})" for run, name in zip(runs, found, strict=True)]


def one_training(keys: Sequence[str]) -> bool:
    """Whether jobs that differ in these config keys ask for the same training on several plans."""
    return all(key.split(".")[0] in PLAN or key == "batch.micro" for key in keys)
