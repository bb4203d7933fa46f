"""What the report reads from run folders, and the leaderboard it makes of it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from report_runs import write_run
from rich.console import Console

from isobatch.report import ReportError, read_runs, write_report
from isobatch.report.__main__ import main
from isobatch.report.metrics import thin
from isobatch.report.read import direction
from isobatch.report.table import tabulate


def quiet() -> Console:
    return Console(file=StringIO(), width=120)


def rows_by_job(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "report.csv").open(newline="") as file:
        return {row["job"]: row for row in csv.DictReader(file)}


def test_writes_every_file_and_a_row_per_job(tmp_path: Path, pictures: None) -> None:
    losses = [1 / (k + 1) for k in range(100)]
    for job, name in enumerate(("single", "ddp", "dp")):
        write_run(tmp_path / str(job), losses, {50: 0.8, 100: 0.9 - job / 100}, {"parallel": {"name": name}})
    console = quiet()
    comparison = write_report([tmp_path], tmp_path, console)
    images = sorted((tmp_path / "report").iterdir())
    assert [p.name for p in images] == ["accuracy.png", "loss.png", "lr.png", "memory.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 5000 for p in images)
    assert (tmp_path / "report.html").stat().st_size > 10_000
    row = rows_by_job(tmp_path)["1"]
    assert row["parallel.name"] == "ddp"
    assert float(row["best eval/accuracy"]) == 0.89  # from metrics.jsonl, as the summary has none
    assert [row[f"s at {k}"] for k in (20, 40, 60, 80, 100)] == ["10.0", "20.0", "30.0", "40.0", "50.0"]
    assert float(row["imbalance"]) == 1.5  # 300 / mean(300, 100)
    assert (row["pids"], row["plan"], row["loss scale"]) == ("100, 101", "48 = 8 × 2 × 3", "1024.0")
    assert row["losses part at"] == "identical"
    assert comparison.failed == 0
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "3 jobs, 3 completed, by best eval/accuracy" in printed and "identical" in printed


def test_jobs_that_a_search_has_ended_are_counted(tmp_path: Path) -> None:
    for job, state in enumerate(("completed", "pruned")):
        write_run(tmp_path / str(job), [1.0, 0.5], {1: 0.8}, {"seed": job}, summary={"state": state})
    console = quiet()
    write_report([tmp_path], tmp_path, console)
    assert "2 jobs, 2 completed (of them 1 pruned)" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "all of them, 1 pruned" in (tmp_path / "report.html").read_text()


def test_repeats_have_a_mean_and_a_deviation(tmp_path: Path) -> None:
    for fold, accuracy in enumerate((0.7, 0.8, 0.9)):
        write_run(tmp_path / "folds" / str(fold), [1.0], {1: accuracy}, {"data": {"fold": fold}}, [f"data.fold={fold}"])
        write_run(tmp_path / "rates" / str(fold), [1.0], {1: accuracy}, {"seed": fold, "optimizer": {"lr": 0.1 * (fold + 1)}},
                  [f"seed={fold}", f"optimizer.lr={0.1 * (fold + 1)}"])  # fmt: skip
    console = quiet()
    comparison = write_report([tmp_path / "folds"], tmp_path / "folds", console)
    assert comparison.spread() == "best eval/accuracy over data.fold: mean 0.8, standard deviation 0.1, of 3 jobs"
    assert "mean 0.8, standard deviation 0.1" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "standard deviation 0.1, of 3 jobs" in (tmp_path / "folds" / "report.html").read_text()
    assert tabulate(read_runs([tmp_path / "rates"])).spread() is None, "trainings that differ are no repeats"


def test_one_run_is_one_job(tmp_path: Path) -> None:
    write_run(tmp_path / "0", [1.0], {1: 0.8}, {"parallel": {"name": "single"}})
    console = quiet()
    write_report([tmp_path], tmp_path, console)
    assert "1 job, 1 completed" in console.file.getvalue()  # type: ignore[attr-defined]


def test_only_differing_keys_are_columns_and_overrides_come_first(tmp_path: Path) -> None:
    common = {"optimizer": {"name": "sgd", "lr": 0.1}, "a": 1}
    write_run(tmp_path / "0", [1.0], config={**common, "run_dir": str(tmp_path / "0"), "precision": {"name": "fp32"}})
    other = {"optimizer": {"name": "sgd", "lr": 0.2}, "a": 2, "run_dir": "x", "precision": {"name": "amp", "scale": 8}}
    write_run(tmp_path / "1", [1.0], config=other, overrides=["optimizer.lr=0.2"])
    keys = tabulate(read_runs([tmp_path])).config_keys
    # precision.scale exists only where precision=amp was chosen, which the column precision.name tells already
    assert list(keys) == ["optimizer.lr", "a", "precision.name"]


def test_jobs_that_did_not_complete_are_rows_with_a_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "0", [3.0, 2.0])
    write_run(tmp_path / "1", [3.0], summary={"state": "failed", "error": "RuntimeError: out of\n memory\x1b[31m"})
    write_run(tmp_path / "2", summary={"state": "refused", "error": "batch.micro=0: must be positive"})
    died, torn = write_run(tmp_path / "3", [3.0, 2.5, 0.001]), write_run(tmp_path / "10", [3.0])
    (died / "summary.json").unlink()
    (torn / "summary.json").write_text('{"state": "compl')
    comparison = write_report([tmp_path], tmp_path, quiet())
    assert [run.job for run in comparison.runs] == ["0", "1", "2", "3", "10"]  # completed first, then 10 after 3
    rows = rows_by_job(tmp_path)
    assert rows["1"]["error"] == "RuntimeError: out of memory[31m"
    assert rows["2"]["state"] == "refused" and rows["2"]["error"].startswith("batch.micro=0")
    assert rows["3"]["error"].startswith("died without a summary") and float(rows["3"]["final train/loss"]) == 0.001
    assert rows["10"]["error"].startswith("summary.json is not readable")
    assert comparison.failed == 4


def test_nan_is_never_best_and_direction_follows_the_metric(tmp_path: Path) -> None:
    values = {"0": (float("nan"), 0.5), "1": (0.3, 0.7), "2": (0.2, float("nan"))}
    for job, (loss, accuracy) in values.items():
        numbers = {"eval/loss": loss, "eval/accuracy": accuracy}
        write_run(tmp_path / job, [1.0], summary={"best": numbers, "final": numbers})
    comparison = tabulate(read_runs([tmp_path]))
    assert comparison.primary == "best eval/accuracy"
    assert [run.job for run in comparison.runs] == ["1", "0", "2"]
    assert comparison.best("best eval/loss") == 0.2
    assert comparison.best("final eval/accuracy") == 0.7
    assert (direction("train/loss"), direction("eval/top1"), direction("eval/samples")) == (-1, 1, 0)


def test_a_failed_job_is_never_best(tmp_path: Path) -> None:
    write_run(tmp_path / "0", [1.0], summary={"best": {"eval/loss": 0.5}})
    write_run(tmp_path / "1", [1.0], summary={"best": {"eval/loss": 0.1}, "state": "failed", "error": "x"})
    comparison = tabulate(read_runs([tmp_path]))
    assert comparison.best("best eval/loss") == 0.5
    assert [run.job for run in comparison.runs] == ["0", "1"]


def test_steps_logged_again_after_a_resume_replace_the_old_rows(tmp_path: Path) -> None:
    run = write_run(tmp_path / "0", [4.0, 3.0, 2.0], {3: 0.1})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "train/lo\n')  # a writer that was killed
        for step, loss in ((2, 3.5), (3, 2.5)):
            file.write(json.dumps({"samples": 48 * step, "train/loss": loss, "step": step}) + "\n")  # other key order
    metrics = read_runs([tmp_path])[0].metrics
    assert list(metrics.train["train/loss"]) == [4.0, 3.5, 2.5]
    assert list(metrics.train["samples"]) == [48, 96, 144]
    assert len(metrics.evals) == 0  # that evaluation belonged to the step that was done again


def test_several_sweeps_get_distinct_names_and_no_run_counts_twice(tmp_path: Path) -> None:
    for sweep in ("a", "b"):
        for job in ("0", "1"):
            write_run(tmp_path / sweep / job, [1.0])
    (tmp_path / "a" / "0" / "checkpoints" / "last").mkdir(parents=True)
    (tmp_path / "a" / "0" / "checkpoints" / "last" / "summary.json").write_text("{}")
    runs = read_runs([tmp_path / "a", tmp_path / "b", tmp_path / "a" / "0"])
    assert [run.job for run in runs] == ["a/0", "a/1", "b/0", "b/1"]
    assert [run.job for run in read_runs([tmp_path / "b" / "1"])] == ["1"]


@pytest.mark.parametrize("missing", [True, False])
def test_a_bad_folder_is_one_clear_line_and_exit_2(tmp_path: Path, missing: bool, capfd: pytest.CaptureFixture) -> None:
    folder = tmp_path / "nowhere" if missing else tmp_path
    with pytest.raises(ReportError):
        read_runs([folder])
    assert main([str(folder)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and str(folder) in err


def test_thinning_keeps_ends_spikes_and_gaps() -> None:
    values = np.linspace(3, 1, 10_000)
    values[4321] = 50.0
    values[9000:] = np.nan
    kept = thin(values, 400)
    assert len(kept) <= 400 and {0, 4321, 9999} <= set(kept)
    assert np.isnan(values[kept]).sum() > 10
    assert list(thin(values[:7], 400)) == list(range(7))


def test_spreadsheets_and_terminals_get_no_commands(tmp_path: Path) -> None:
    for job, text in enumerate(("=cmd()", "[red]x[/red]", "-1")):
        write_run(tmp_path / str(job), [1.0], config={"note": text})
    console = quiet()
    write_report([tmp_path], tmp_path, console)
    assert [rows_by_job(tmp_path)[job]["note"] for job in ("0", "1", "2")] == ["'=cmd()", "[red]x[/red]", "-1"]
    assert "[red]x[/red]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_needs_no_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "0", [1.0, 0.5])
    code = "import sys; sys.modules['torch'] = None; from isobatch.report.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout


def test_many_long_jobs_stay_cheap(tmp_path: Path) -> None:
    """A fiftieth of 500 jobs x 10,000 steps, which must take less than 20 s: here 20 jobs x 5,000 steps."""
    accuracy = dict.fromkeys(range(100, 5001, 100), 0.5)
    first = write_run(tmp_path / "0", [1 + 1 / (k + 1) for k in range(5_000)], accuracy)
    text = (first / "metrics.jsonl").read_bytes()
    for job in range(1, 20):
        (write_run(tmp_path / str(job), [1.0]) / "metrics.jsonl").write_bytes(text)
    start = time.process_time()  # of this process alone: the machine may be busy
    runs = read_runs([tmp_path])
    assert time.process_time() - start < 4
    assert all(len(run.metrics.train) <= 400 and len(run.metrics.losses) == 0 for run in runs)
    assert all(run.difference.common_steps == 5_000 and run.difference.identical for run in runs)
