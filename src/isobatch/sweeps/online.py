"""The comparison of a sweep as one more W&B run beside those of its jobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isobatch.logger import RunInfo, WeightsAndBiases, access, job_facts
from isobatch.report import Leaderboard


def upload(node: Mapping[str, Any], folder: Path, comparison: Leaderboard) -> bool:
    """Send the table and the pictures, where the jobs' runs went online too; returns whether they did.

    Offline it would cost every sweep seconds for a table that lies in its folder anyway.

    Args:
        node: the group `logger` of the sweep's own configuration.
        folder: the sweep's, with report/*.png.
    """
    names = (node.get("name"), *(node.get("loggers") or ()))
    if "wandb" not in names or access.resolve(str(node.get("mode", "auto"))).mode != "online":
        return False
    keys = ("mode", "project", "entity", "finish_timeout_s", "save_files")
    options = WeightsAndBiases(run_name="comparison", **{key: node[key] for key in keys if key in node})
    group = job_facts.JobFacts(folder).group
    logger = options.build(RunInfo(folder, {"task": "comparison"}, group, files=("report.html", "report.csv")))
    logger.start({})
    rows = [[row[column.key] for column in comparison.columns] for row in comparison.rows]
    images = {path.stem: path for path in sorted((folder / "report").glob("*.png"))}
    logger.report({"samples": 0}, images, {"comparison": ([column.title for column in comparison.columns], rows)})
    logger.finish({"state": "completed"}, 0)
    return True
