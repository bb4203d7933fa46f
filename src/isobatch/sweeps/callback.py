"""The Hydra callback that ends every sweep (`-m`) with its comparison.

Wired in conf/ under `hydra.callbacks`. A plain run never reaches it, and it imports nothing of the report until a
sweep is over.
"""

from __future__ import annotations

import atexit
import logging
import os
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

log = logging.getLogger(__name__)


class SweepReport(Callback):
    """Writes report.html, report.csv and report/*.png into the sweep folder.

    tolerance: None to compare only; a number asks that every job trained the same model as the first within it
    (0: to the bit), prints a verdict for each and ends the sweep with exit code 1 if one fails.
    """

    def __init__(self, tolerance: float | None = None, enabled: bool = True) -> None:
        self.tolerance, self.enabled = tolerance, enabled
        self._folder: Path | None = None
        self._process = os.getpid()
        self._logger: dict[str, Any] = {}

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Remembers the folder, absolute, before any job changes the directory."""
        if not self.enabled or ("sweep" in config and config.sweep.dry_run):
            return
        self._folder = Path(config.hydra.sweep.dir).absolute()
        self._logger = dict(config.logger) if "logger" in config else {}
        # Hydra's sweeper raises when a job failed and then skips on_multirun_end, but a sweep with a failed job needs
        # its comparison most. The exit code is decided by then, so the report at exit only writes.
        atexit.register(self._at_exit)

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        """The report; SystemExit(1) where a tolerance is set and a job does not keep to it."""
        if self._report() is False:
            raise SystemExit(1)  # not an Exception: Hydra turns those of a callback into a warning

    def _at_exit(self) -> None:
        if os.getpid() == self._process:  # a forked rank inherits the registration
            if self._folder is not None and not any(self._folder.glob("*/.hydra")):
                self._folder = None  # refused before its first job: the refusal is all there is to say
            self._report()

    def _report(self) -> bool | None:
        """Writes the report once. Returns whether all jobs keep to the tolerance, None if none is asked for."""
        folder, self._folder = self._folder, None
        if folder is None or not folder.is_dir():
            return None
        atexit.unregister(self._at_exit)
        from isobatch.report import ReportError, compare, print_verdicts, usable_cores, write_report

        try:
            comparison = write_report([folder], folder, processes=usable_cores())
        except ReportError as error:
            log.warning("no comparison: %s", error)
            return None if self.tolerance is None else False
        except Exception as error:  # the jobs are done: a report that fails must not turn them into a failed sweep
            log.warning("the comparison failed: %s: %s", type(error).__name__, error)
            return None if self.tolerance is None else False
        log.info("comparison: %s", folder / "report.html")
        try:
            from isobatch.sweeps import online

            online.upload(self._logger, folder, comparison)
        except Exception as error:
            log.warning("the comparison was not uploaded: %s: %s", type(error).__name__, error)
        if self.tolerance is None:
            return None
        verdicts = compare(comparison.runs, self.tolerance)
        print_verdicts(verdicts, self.tolerance)
        return all(verdict.passed for verdict in verdicts)
