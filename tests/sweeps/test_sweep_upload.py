"""The comparison of a sweep goes to W&B where its jobs went, and costs nothing where they did not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_runs import write_run
from wandb_standin import bare_environ, offline_files, read_offline

from isobatch.logger import access
from isobatch.report import write_report
from isobatch.sweeps import online

NODE = {"name": "wandb", "mode": "auto", "project": "mine", "entity": None, "finish_timeout_s": 10, "tags": []}


def test_the_table_and_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_wandb: None) -> None:
    for key, value in bare_environ(tmp_path).items():
        monkeypatch.setenv(key, value)
    folder = tmp_path / "2030-01-01" / "10-00-00"
    write_run(folder / "0", [1.0, 0.5], config={"seed": 0})
    write_run(folder / "1", [], config={"seed": 1}, summary={"state": "failed", "error": "on purpose"})
    comparison = write_report([folder], folder)
    assert not online.upload(NODE, folder, comparison)  # no key: the jobs stayed offline
    assert not online.upload({**NODE, "name": "none"}, folder, comparison)
    assert not online.upload({"name": "several", "loggers": ["tensorboard"]}, folder, comparison)
    assert not offline_files(tmp_path)
    # the answer is online, and what is then opened lies on disk, where a test can read it
    answers = iter(["online"])
    monkeypatch.setattr(access, "resolve", lambda mode: access.Access(next(answers, "offline"), access.DEFAULT_URL))
    assert online.upload({**NODE, "name": "several", "loggers": ["wandb", "none"]}, folder, comparison)
    (file,) = offline_files(folder)
    run = read_offline(file)
    assert run.meta["run_group"] == "2030-01-01_10-00-00" and run.meta["display_name"] == "comparison"
    assert run.meta["job_type"] == "comparison" and run.meta["project"] == "mine"
    (row,) = run.history
    assert row["comparison"]["_type"] == "table-file" and row["loss"]["_type"] == "image-file"
    (table,) = (json.loads(path.read_text()) for path in folder.rglob("*.table.json"))
    assert {"isobatch/report.html", "isobatch/report.csv"} <= set(run.files)
    assert "job" in table["columns"] and "seed" in table["columns"]
    assert sorted(line[table["columns"].index("state")] for line in table["data"]) == ["completed", "failed"]
