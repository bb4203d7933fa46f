"""The process that writes down that a training process was killed."""

from __future__ import annotations

import json
from pathlib import Path

from isobatch.launch import watchdog

GONE = -1  # nobody's parent


def test_what_a_process_told_of_its_end_stands_however_late_the_witness_starts(tmp_path: Path) -> None:
    summary, log, blank = tmp_path / "summary.json", tmp_path / "train.log", json.dumps({"error": "killed"})
    before = watchdog._modified(str(summary))
    summary.write_text('{"error": "its own story"}')
    watchdog.watch(GONE, str(summary), str(log), blank, str(before))
    assert json.loads(summary.read_text())["error"] == "its own story" and not log.exists()
    watchdog.watch(GONE, str(summary), str(log), blank, str(watchdog._modified(str(summary))))
    assert json.loads(summary.read_text())["error"] == "killed" and log.read_text() == "isobatch: killed\n"
