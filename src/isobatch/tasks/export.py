"""`task=export`: a run's model as files that other programs load (exporting.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.tasks.base import Task

if TYPE_CHECKING:
    from isobatch.config import Config


class Export(Task):
    name = "export"
    built = "nothing"
    needs_run = True
    reads_data = False
    logs = False
    one_process = True

    def alone(self, config: Config, run_dir: Path) -> None:
        from isobatch.tasks.exporting import export

        export(config, run_dir)
