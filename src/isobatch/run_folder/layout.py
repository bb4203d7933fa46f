"""The names in a run folder and in a sweep's, spelled here alone: the first thing to know for any storage but a local disk.

config.yaml plan.json metrics.jsonl summary.json train.log checkpoints/    of a run
multirun.yaml                                                             of a sweep, beside its jobs' folders
"""

from __future__ import annotations

CONFIG = "config.yaml"
PLAN = "plan.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
LOG = "train.log"
LOGGED = "logged.json"  # rows that a logger has and metrics.jsonl not, since the run was interrupted after them
CHECKPOINTS = "checkpoints"
MULTIRUN = "multirun.yaml"

# The states of a run that has come to an end of its own; the last may go on. Others: stopped (a signal), failed.
PRUNED = "pruned"  # by a search
DONE = ("completed", "early_stopped", "threshold_reached", PRUNED)
ENDED = (*DONE, "out_of_time")

# Of what a run writes: a reader that knows less says so instead of guessing. Runs from before there was a number have none.
FORMAT = 1
