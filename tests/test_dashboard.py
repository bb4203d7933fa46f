"""The workspace as code, without an account and against a server on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from wandb_standin import StandIn, bare_environ

from isobatch import dashboard


def run(*words: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, "-m", "isobatch.dashboard", *words], env=environ, capture_output=True,
                    stdin=subprocess.DEVNULL,
                    preload=("wandb_workspaces.workspaces", "wandb_workspaces.reports.v2"))  # fmt: skip


def test_saved_workspace_is_the_one_of_the_dry_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces")
    with StandIn() as server:
        done = run("team/proj", environ=server.environ(tmp_path))
        assert done.returncode == 0, done.stderr
        assert "team/proj" in done.stdout
        (view,) = server.views
    dry = run("team/proj", "--dry-run", environ=bare_environ(tmp_path))
    spec = json.loads(dry.stdout)["spec"]
    sections = spec["section"]["panelBankConfig"]["sections"]
    shown = {section["name"]: [panel["config"] for panel in section["panels"]] for section in sections}
    assert {*dashboard.CURVES, "Plan comparison"} <= set(shown)
    drawn = {metric for panels in shown.values() for config in panels for metric in config.get("metrics", [])}
    assert {"train/loss", "eval/accuracy", "perf/samples_per_s", "train/loss_scale"} <= drawn
    lines = [config for section in dashboard.CURVES for config in shown[section]]
    assert lines and all(config["xAxis"] == "samples" for config in lines)
    saved = json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]
    assert [s["name"] for s in saved] == [s["name"] for s in sections]


def test_refusals_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboard.main(["only-a-project"]) == 2
    assert "is not ENTITY/PROJECT" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert dashboard.main(["team/proj", "--dry-run"]) == 2
    assert "pip install 'isobatch[dashboard]'" in capsys.readouterr().err


def test_without_a_key_nothing_asks(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces")
    done = run("team/proj", environ=bare_environ(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "WANDB_API_KEY" in done.stderr
