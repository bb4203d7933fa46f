"""The callback in a real Hydra sweep: a report at its end, also when a job failed, and the equivalence's exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import warm

APP = """
import json, sys
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(cfg):
    folder = Path(HydraConfig.get().runtime.output_dir)
    state = {"state": "completed", "weights_sha256": "aa", "error": None}
    if cfg.fail:
        state = {"state": "failed", "error": "RuntimeError: on purpose"}
    (folder / "summary.json").write_text(json.dumps(state))
    (folder / "config.yaml").write_text(f"loss: {cfg.loss}\\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "samples": 4, "train/loss": cfg.loss}) + "\\n")
    if cfg.fail:
        raise RuntimeError("on purpose")

main()
"""
CONFIG = """
loss: 1.0
fail: false
tolerance: null
hydra:
  sweep: {dir: sweep}
  callbacks:
    report: {_target_: isobatch.sweeps.callback.SweepReport, tolerance: "${tolerance}"}
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG)
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def run(app: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, "app.py", *overrides], cwd=app, capture_output=True)


def test_a_sweep_ends_in_a_report_and_a_plain_run_does_not(app: Path) -> None:
    done = run(app, "-m", "loss=1.0,2.0")
    assert done.returncode == 0, done.stderr
    assert "2 jobs, 2 completed" in done.stdout and "Warning" not in done.stderr
    assert all((app / "sweep" / name).exists() for name in ("report.html", "report.csv", "report/loss.png"))
    plain = run(app, "hydra.run.dir=plain")
    assert plain.returncode == 0 and not (app / "plain" / "report.html").exists() and "completed" not in plain.stdout


def test_a_failed_job_is_in_the_report_and_the_exit_code_stays(app: Path) -> None:
    done = run(app, "-m", "fail=false,true", "hydra.job.chdir=true")
    assert done.returncode == 1
    assert "job 1: failed: RuntimeError: on purpose" in done.stdout
    assert "on purpose" in (app / "sweep" / "report.csv").read_text()


@pytest.mark.parametrize(("losses", "code"), [("1.0,1.0", 0), ("1.0,1.0001", 1)])
def test_an_equivalence_sweep_fails_beyond_its_tolerance(app: Path, losses: str, code: int) -> None:
    done = run(app, "-m", f"loss={losses}", "tolerance=1e-5")
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.count("FAIL") == code and "PASS" in done.stdout
