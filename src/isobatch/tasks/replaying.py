"""The steps of `task=replay`, and its verdict."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from isobatch.batch_plan import counted
from isobatch.compare.rows import RowComparison, compare_rows
from isobatch.compare.runs import as_changes
from isobatch.config import flat
from isobatch.errors import ConfigError, JobFailed
from isobatch.run_folder import layout
from isobatch.run_folder.files import finite, write_json
from isobatch.run_folder.reading import Unreadable, usable
from isobatch.run_folder.rows import rows, step_of
from isobatch.runtime.dtensor import whole
from isobatch.tasks.base import Work
from isobatch.train.loop import Loop

log = logging.getLogger("isobatch")

ROUNDING = 1e-2  # relative distance of a loss that another rounding may grow to: AdamW's first steps follow signs


def replay(work: Work) -> None:
    """Train the steps, compare, and say what came out. All ranks run it.

    Raises:
        ConfigError: there are no recorded steps there. JobFailed: they do not come out as recorded.
    """
    loop, config = work.loop, work.config
    run = Path(config.plain["resume"])
    first = loop.state.step
    last = last_step(run, first, config.replay.steps, loop.total_steps) if loop.ranks.is_main else 0
    loop.total_steps = loop.ranks.agree(last)
    if loop.total_steps <= first:
        raise ConfigError("replay.from", first, f"{run} has recorded no step after it", "set replay.from to an earlier step")
    loop.train()
    tensors = differing_weights(loop, run)  # a collective where weights are spread
    verdict: Any = None
    if loop.ranks.is_main:
        loop.files.close()
        verdict = judge(work, run, first, tensors)
        write_json(work.run_dir / "replay.json", verdict)
    verdict = loop.ranks.broadcast_object(verdict)
    if not verdict["reproduces"]:
        raise JobFailed(f"replay: {verdict['verdict']}")
    log.info("replay: %s", verdict["verdict"])


def last_step(run: Path, first: int, steps: int | None, total: int) -> int:
    """The last step to train: `steps` after `first`, but none that the run has not recorded."""
    recorded = 0
    with suppress(Unreadable):
        recorded = max((step_of(row) or 0 for row in rows(run)), default=0)
    return min(total, recorded, first + steps if steps is not None else total)


def differing_weights(loop: Loop, run: Path) -> list[str] | None:
    """Names of the tensors that differ from the checkpoint of the step that was reached; None = there is none of it."""
    from isobatch.checkpoint import reading

    saved: dict[str, Any] | None = None
    if loop.ranks.is_main:
        for name in (f"step-{loop.state.step}", "last", "best"):
            try:
                found = reading.read(run, name)
            except ConfigError:
                continue
            if found.step == loop.state.step:
                saved = found.state["model"]
                break
    here = {name: whole(tensor).detach().cpu() for name, tensor in loop.state.model.state_dict().items()}
    if saved is None:
        return None
    there = saved
    return [name for name, tensor in here.items() if name not in there or not torch.equal(tensor, there[name])]


def judge(work: Work, run: Path, first: int, tensors: list[str] | None) -> dict[str, Any]:
    """The verdict as it is written to replay.json."""
    common = compare_rows(run / layout.METRICS, work.run_dir / layout.METRICS)
    identity = as_changes(*(_fact(folder, "identity") for folder in (run, work.run_dir)))
    data = as_changes(*(flat(_fact(folder, "data_fingerprint")) for folder in (run, work.run_dir)))
    exact = bool(work.config.reduction.exact)
    steps = f"steps {first + 1} to {work.loop.state.step}"
    bits = common.first is None and not tensors
    # rounding moves a loss a little, and an accuracy by whole samples
    largest = max((far for key, far in common.largest.items() if key.endswith(("loss", "/lr"))), default=0.0)
    why = [f"{change.key} {change.here} -> {change.there}" for change in identity]
    if not exact:
        why.append("reduction=fast promises rounding only")
    if not common.common:
        ok, text = False, f"no logged step is common to both in {steps}"
    elif bits:
        also = "" if tensors is None else " and the weights"
        ok, text = True, f"{steps} reproduce here to the bit: {counted(common.common, 'row')}{also}"
    else:
        ok = bool(why) and largest <= ROUNDING
        where = f"step {common.first.step}, {common.first.key}" if common.first else f"the weights, {(tensors or ['?'])[0]}"
        where += f" (and {tensors[0]} of the last weights)" if common.first and tensors else ""
        where += f" (from other data: {data[0].key})" if data else ""
        far = f"losses at most {largest:.2g} apart"
        because = f" (bits cannot be compared: {'; '.join(why)})" if why else ""
        said = f"reproduce here up to rounding, {far}" if ok else f"do not reproduce here: first at {where}, {far}"
        text = f"{steps} {said}{because}"
    result: dict[str, Any] = finite({
        "run": str(run), "from": first, "to": work.loop.state.step, "reproduces": ok, "to_the_bit": bits, "verdict": text,
        "rows": rows_of(common), "tensors": tensors, "identity": [change.__dict__ for change in identity],
        "data": [change.__dict__ for change in data],
        "identities": {name: _fact(folder, "identity") for name, folder in (("run", run), ("here", work.run_dir))},
    })  # fmt: skip
    return result


def rows_of(rows: RowComparison) -> dict[str, Any]:
    return {"common": rows.common, "first": rows.first and rows.first.__dict__, "largest": rows.largest}


def _fact(folder: Path, key: str) -> dict[str, Any]:
    """A mapping of plan.json, or of the plan in a folder's summary."""
    from isobatch.report.read import read_run

    plan = usable(folder, layout.PLAN)
    found = (read_run("", folder).plan if plan is None else plan).get(key)
    return dict(found) if isinstance(found, dict) else {}
