"""Two run folders, compared in the order in which one thing follows from another: settings, data, numbers, weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isobatch.compare.rows import RowComparison, compare_rows, same
from isobatch.config import flat
from isobatch.report.distance import WEIGHTS_FILE
from isobatch.report.read import _mapping as read_mapping
from isobatch.report.read import find_runs, one_line
from isobatch.resume.contract import differences
from isobatch.run_folder import layout

BATCH = ("effective_batch", "shard", "num_shards", "micro_batch", "num_replicas", "accumulation_steps", "world_size")
LENGTH = ("steps", "steps_per_epoch", "samples_per_epoch", "tail_size")
NAMED_TENSORS = 8  # of the tensors that differ, so many are named


@dataclass(frozen=True)
class Change:
    """A setting or fact that is not the same in both runs."""

    key: str
    here: Any
    there: Any


@dataclass(frozen=True)
class Comparison:
    """One run against the first.

    contract: settings that decide what is trained. plan: the others, which need not be equal for equal training.
    identity: what changes bits although the contract is kept (machine, torch, precision). data: number, order and digest
    of samples. weights: whether the final weights are the same to the bit, None if a run has none; tensors: those that are not.
    unread: damaged files, of which nothing is compared, in words.
    """

    first: str
    other: str
    contract: list[Change]
    plan: list[Change]
    identity: list[Change]
    data: list[Change]
    rows: RowComparison
    weights: bool | None
    tensors: dict[str, float]
    unread: list[str]

    @property
    def same(self) -> bool:
        """Every number that both logged is the same to the bit, and so are the weights, where both have some."""
        return self.rows.common > 0 and self.rows.first is None and self.weights is not False and not self.data

    @property
    def verdict(self) -> str:
        """One line: the first place where the two part."""
        rows = self.rows
        if rows.first is not None:
            far = f"relative distance {rows.first.distance:.3g}"
            return f"parts at step {rows.first.step}: {rows.first.key} {rows.first.here} here, {rows.first.there} there ({far})"
        if not rows.common:
            return "cannot be compared: no step was logged by both"
        if self.data:
            return f"the same numbers in {rows.common} rows, from other data: {self.data[0].key}"
        if self.weights is False:
            named = f", first in {next(iter(self.tensors))}" if self.tensors else ""
            return f"the same numbers in {rows.common} rows, but other final weights{named}"
        unlike = rows.only_first + rows.only_other
        also = f" ({unlike} rows were logged by one of them alone)" if unlike else ""
        return f"the same to the bit: {rows.common} rows{' and the final weights' if self.weights else ''}{also}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "same": self.same, "verdict": self.verdict}


def compare_runs(folders: list[Path]) -> list[Comparison]:
    """Every run below `folders` against the first of them.

    Raises:
        ReportError: a folder is missing, or there are fewer than two runs.
    """
    from isobatch.report.read import ReportError

    runs = find_runs(folders)
    if len(runs) < 2:
        raise ReportError(f"one run alone ({one_line(runs[0][1])}) compares with nothing; name two run folders, or a sweep's")
    return [compare_two(runs[0], other) for other in runs[1:]]


def compare_two(first: tuple[str, Path], other: tuple[str, Path]) -> Comparison:
    """Each: (name, run folder)."""
    (here_name, here), (there_name, there) = first, other
    names = layout.CONFIG, layout.PLAN, layout.SUMMARY
    found = {(folder, name): read_mapping(folder, name) for name in names for folder in (here, there)}
    configs, plans, summaries = ([found[folder, name][0] for folder in (here, there)] for name in names)
    contract = {change.key for change in differences(*configs)}
    changed = [change for change in as_changes(*map(flat, configs)) if not change.key.startswith("hydra.")]
    digests = [summary.get("weights_sha256") for summary in summaries]
    weights = digests[0] == digests[1] if all(digests) else None
    return Comparison(
        first=here_name,
        other=there_name,
        contract=[c for c in changed if c.key in contract],
        plan=[c for c in changed if c.key not in contract]
        + as_changes(*({key: plan[key] for key in BATCH + LENGTH if key in plan} for plan in plans)),
        identity=as_changes(*(flat(_dict(plan.get("identity"))) for plan in plans)),
        data=as_changes(*(flat(_dict(plan.get("data_fingerprint"))) for plan in plans)),
        rows=compare_rows(here / layout.METRICS, there / layout.METRICS),
        weights=weights,
        tensors=differing_tensors(here, there) if weights is False else {},
        unread=[
            f"{folder / name}: {problem}" for (folder, name), (_, problem) in found.items() if problem and problem != "missing"
        ],
    )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_changes(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[Change]:
    """Of keys that both sides know: an option that only one has came or went between versions."""
    return [Change(key, here[key], there[key]) for key in here if key in there and not same(here[key], there[key])]


def differing_tensors(here: Path, there: Path) -> dict[str, float]:
    """Name -> largest absolute difference, of the first saved tensors that differ, in the model's order."""
    import numpy as np
    from safetensors import SafetensorError, safe_open

    found: dict[str, float] = {}
    try:
        with safe_open(here / WEIGHTS_FILE, framework="np") as a, safe_open(there / WEIGHTS_FILE, framework="np") as b:
            names = set(b.keys())
            for name in a.keys():  # noqa: SIM118, a safe_open is no mapping
                if name not in names:
                    found[name] = float("inf")
                    continue
                one, two = a.get_tensor(name), b.get_tensor(name)
                if one.shape != two.shape:
                    found[name] = float("inf")
                elif not np.array_equal(one, two, equal_nan=one.dtype.kind == "f"):
                    found[name] = float(np.abs(one.astype(np.float64) - two.astype(np.float64)).max())
                if len(found) == NAMED_TENSORS:
                    break
    except (SafetensorError, OSError, TypeError, ValueError):  # damaged, missing, or of a dtype that numpy lacks
        return found
    return found
