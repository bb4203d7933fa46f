"""Trackio: runs in a local database, shown by a local page."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from isobatch.errors import reason
from isobatch.logger import job_facts
from isobatch.logger.protocol import Logger, RunInfo
from isobatch.run_folder.rows import name_of

if TYPE_CHECKING:
    from isobatch.logger.options import Trackio

log = logging.getLogger("isobatch")


class TrackioLogger(Logger):
    """One run of `project` in TRACKIO_DIR (by default below ~/.cache); its steps are `samples`.

    Trackio's own thread writes, so no row waits for the disk. What it raises is told once and costs rows, not the training.
    """

    def __init__(self, options: Trackio, info: RunInfo):
        self.options, self.info = options, info
        self.how_to_look = [f"trackio show --project {options.project}"]
        self._told = False
        self._logged: Collection[tuple[int, str]] = ()

    def start(self, plan: Mapping[str, Any], run_id: str | None = None, samples: int = 0,
              logged: Collection[tuple[int, str]] = ()) -> None:  # fmt: skip
        folder = self.info.run_dir.absolute()
        # trackio finds a run again by its name, so the name is the id that a checkpoint keeps
        self.run_id = run_id or re.sub(r"[^A-Za-z0-9_-]", "-", f"{folder.parent.name}_{folder.name}")[-128:]
        self._logged = logged if run_id else ()
        facts = job_facts.read(self.info.run_dir)
        config = {**self.info.plain, **{f"plan/{key}": value for key, value in plan.items()},
                  "differing": ",".join(facts.differing), "run_dir": str(folder)}  # fmt: skip

        def begin() -> None:
            import trackio

            trackio.init(project=self.options.project, name=self.run_id, group=facts.group, config=config, embed=False,
                         resume="allow" if run_id else "never", auto_log_gpu=False, auto_log_cpu=False)  # fmt: skip

        self._safely(begin)

    def log(self, row: Mapping[str, Any]) -> None:
        import trackio

        if name_of(row) in self._logged:
            return
        numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
        self._safely(lambda: trackio.log(numbers, step=int(row["samples"])))

    def finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        if self.run_id is None:
            return
        import trackio

        best = {f"best/{metric}": value for metric, value in (summary.get("best") or {}).items()}
        self._safely(lambda: trackio.log({**best, "exit_code": exit_code}, step=int(summary.get("samples") or 0)))
        self._safely(trackio.finish)

    def _safely(self, do: Callable[[], Any]) -> None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints how to look; the end of the output says it too
                do()
        except Exception as error:
            if not self._told:
                log.warning("trackio: not recorded (%s); metrics are in metrics.jsonl", reason(error))
            self._told = True
