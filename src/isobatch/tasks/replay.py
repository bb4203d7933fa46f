"""`task=replay`: steps of a run are trained again, here and on this plan, and compared with what the run has recorded.

`replay.from` names a checkpoint's step (0: from the seed), `replay.steps` how many steps. Nothing of the run is changed: the
rows that are trained again stand in the replay's own folder, with the verdict in replay.json.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.errors import ConfigError
from isobatch.run_folder import layout
from isobatch.tasks.base import Task, Work

if TYPE_CHECKING:
    from isobatch.config import Config
    from isobatch.runtime.distributed import Ranks


class Replay(Task):
    name = "replay"
    trains = True
    needs_run = True
    logs = False

    def settled(self, config: Config, ranks: Ranks) -> Config:
        """From the checkpoint (or the seed) that the replay begins at; it saves none of its own."""
        from isobatch.checkpoint import NoCheckpoint
        from isobatch.resume.start import on_main

        run = Path(str(config.resume))
        start: int = on_main(ranks, lambda: first_step(run, config.replay.start))
        batch: Any = config.batch if start else on_main(ranks, lambda: as_cut(config, run))
        return dataclasses.replace(config, batch=batch, checkpoint=NoCheckpoint(load=f"step-{start}", resume="never"))

    def perform(self, work: Work) -> None:
        from isobatch.tasks.replaying import replay

        replay(work)


def first_step(run: Path, asked: int | None) -> int:
    """The step to begin at: `asked`, else the run's earliest checkpoint that has steps after it, else 0.

    Raises:
        ConfigError: no run, or no checkpoint of that step.
    """
    from isobatch.checkpoint.folder import names
    from isobatch.report.read import read_run

    recorded = read_run("", run).summary
    if not (run / layout.METRICS).is_file():
        raise ConfigError("resume", run, "holds no metrics.jsonl to compare with", "set resume to a run folder")
    last = recorded.get("steps")
    steps = sorted(int(name.removeprefix("step-")) for name in names(run / layout.CHECKPOINTS) if name.startswith("step-"))
    if asked is None:
        return next((step for step in steps if isinstance(last, int) and step < last), 0)
    if asked and asked not in steps:
        there = ", ".join(map(str, [0, *steps]))
        raise ConfigError("replay.from", asked, f"{run} has no checkpoint of that step", f"choose one of {there}")
    return asked


def as_cut(config: Config, run: Path) -> Any:
    """The batch as the run was cut: what nobody has typed followed from its own plan.

    Raises:
        ConfigError: the run's settings are others.
    """
    from isobatch.report.read import read_run
    from isobatch.resume import contract
    from isobatch.run_folder.reading import usable

    before, plan = usable(run, layout.CONFIG), read_run("", run).plan
    changed = contract.differences(before or {}, config.plain)
    if changed and not config.allow_contract_change:
        raise ConfigError(changed[0].key, changed[0].now, f"{run} was trained with {changed[0]}",
                          "keep it: a replay trains what the run did")  # fmt: skip
    micro = plan.get("micro_batch")
    fixed = getattr(config.batch, "shard", None) is not None or not isinstance(micro, int)
    return config.batch if fixed else dataclasses.replace(config.batch, micro=micro)
