"""`task=plan`: say what would be done, for a world that need not be there, and stop."""

from __future__ import annotations

from isobatch.tasks.base import Task


class Plan(Task):
    name = "plan"
    built = "plan"
    logs = False
    one_process = True  # the ranks are planned for without being started (planner/preview.py)
