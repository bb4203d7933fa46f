"""The report for a person who compares twelve jobs: names, what is always shown, what is listed apart, what is folded."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from report_runs import write_run
from rich.console import Console

from isobatch.report import Leaderboard, write_report
from isobatch.report.leaderboard import constant
from isobatch.report.read import direction


def swept(root: Path, count: int = 4, **summaries: Any) -> None:
    """A sweep over lr and accumulation, whose jobs 0 and 2 tie in accuracy."""
    for job in range(count):
        lr, steps = (0.001, 0.01, 0.1)[job % 3], (1, 3)[job // 3 % 2]
        best = {"eval/accuracy": 0.5 + 0.1 * (job % 2), "eval/loss": 1.0 - 0.1 * job}
        config = {"optimizer": {"name": "timm", "lr": lr}, "accumulation": {"name": "accumulation", "steps": steps}}
        write_run(root / str(job), [2.0, 1.5 - lr - steps / 100], config=config, summary={"best": best, **summaries},
                  overrides=[f"optimizer.lr={lr}", f"accumulation={steps}", "logger=none"])  # fmt: skip


def report(root: Path, width: int = 80) -> tuple[Leaderboard, str, str]:
    """(comparison, terminal, page)."""
    console = Console(file=io.StringIO(), width=width)
    comparison = write_report([root], root, console)
    return comparison, console.file.getvalue(), (root / "report.html").read_text()  # type: ignore[attr-defined]


def test_jobs_are_named_by_what_differs_everywhere(tmp_path: Path, pictures: None) -> None:
    swept(tmp_path)
    comparison, _, page = report(tmp_path)
    assert set(comparison.names) == {"lr 0.001, accumulation 1", "lr 0.01, accumulation 1", "lr 0.1, accumulation 1",
                                     "lr 0.001, accumulation 3"}  # fmt: skip
    for name in comparison.names:
        assert page.count(name) >= 4, "the row that a curve's hover is named by, the chip, the memory bars"
    assert "job 0" not in page and f'data-n="{comparison.names[0]}"' in page


def test_names_differ_also_where_settings_do_not(tmp_path: Path) -> None:
    for job in "01":
        write_run(tmp_path / job, [1.0], overrides=["seed=0"])
    assert report(tmp_path)[0].names == ["job 0", "job 1"]
    for job, optimizer in enumerate(("sgd", "adamw", "adamw")):
        options = {"name": "timm", "opt": optimizer, "lr": 0.1 * (optimizer == "sgd")}
        write_run(tmp_path / "choice" / str(job), [1.0], config={"optimizer": options}, overrides=[f"optimizer={optimizer}"])
    comparison = report(tmp_path / "choice")[0]
    assert comparison.names == ["optimizer sgd", "optimizer adamw (job 1)", "optimizer adamw (job 2)"]
    assert comparison.swept == ["optimizer"]


def test_choices_of_one_class_are_told_apart(tmp_path: Path) -> None:
    for job, (word, name, late) in enumerate((("dp", "dp", False), ("ddp", "ddp", False), ("apex_ddp", "ddp", True))):
        config = {"parallel": {"name": name, **({"late": late} if name == "ddp" else {})}}
        write_run(tmp_path / str(job), [1.0], config=config, overrides=[f"parallel={word}"])
    comparison, terminal, _ = report(tmp_path)
    assert comparison.names == ["parallel dp", "parallel ddp", "parallel apex_ddp"] and "apex_ddp" in terminal


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_what_was_swept_and_the_ranked_metric_are_always_shown(tmp_path: Path, width: int) -> None:
    swept(tmp_path)
    terminal = "".join(report(tmp_path, width)[1].split())
    assert "losses" not in terminal and "0.001" in terminal
    assert all(part in terminal for part in ("lr", "0.6", "30.001" if width == 40 else "accur")), terminal


def test_losses_part_is_said_of_plans_alone(tmp_path: Path) -> None:
    swept(tmp_path / "trainings")
    _, terminal, page = report(tmp_path / "trainings", 200)
    assert "losses part" not in " ".join(terminal.split()) and "same losses, to the bit" not in page
    for job, steps in enumerate((1, 3)):
        write_run(tmp_path / "plans" / str(job), [2.0, 1.0], config={"accumulation": {"steps": steps}},
                  overrides=[f"accumulation={steps}"])  # fmt: skip
    _, terminal, page = report(tmp_path / "plans", 200)
    assert "part" in terminal and "same losses, to the bit" in page


def test_ties_are_broken_by_the_loss_and_equal_figures_are_not_bold(tmp_path: Path) -> None:
    swept(tmp_path)
    comparison = report(tmp_path)[0]
    assert [run.job for run in comparison.runs] == ["3", "1", "2", "0"]
    assert comparison.leading("best eval/accuracy") == comparison.winners("best eval/accuracy") == [0, 1]
    assert not comparison.leading("samples/s") and len(comparison.winners("samples/s")) == 4, "all are equal"
    assert direction("train/loss_scale") == direction("final train/loss_scale") == 0


def test_best_is_said_among_those_that_compete_as_they_are_shown(tmp_path: Path) -> None:
    figures = [0.6, 0.60000001, None, 0.6, 0.9]  # equal to a person; unknown; not completed; no training
    for job, figure in enumerate(figures):
        more = [{}, {}, {}, {"state": "failed", "error": "x"}, {}][job]
        best = {} if figure is None else {"eval/accuracy": figure}
        write_run(tmp_path / str(job), [1.0], config={"seed": job, "task": "evaluate" if job == 4 else "train"},
                  overrides=[f"seed={job}"], summary={"best": best, **more})  # fmt: skip
    comparison, _, page = report(tmp_path, 200)
    assert comparison.leading("best eval/accuracy") == [], "neither an unknown one, nor a failed, nor an evaluation is beaten"
    assert [comparison.runs[at].job for at in comparison.winners("best eval/accuracy")] == ["1", "0"]
    assert "the same for all</p>" in page and "n best" not in page
    write_run(tmp_path / "5", [1.0], overrides=["seed=5"], summary={"best": {"eval/accuracy": 0.5}})
    comparison, _, page = report(tmp_path, 200)
    assert {comparison.runs[at].job for at in comparison.leading("best eval/accuracy")} == {"0", "1"}
    assert page.count("n best") == 2 and "2 jobs, the first" in page


def test_columns_that_are_the_same_everywhere_are_folded(tmp_path: Path) -> None:
    swept(tmp_path)
    comparison, _, page = report(tmp_path)
    folded = {column.key for column in constant(comparison)}
    assert {"samples/s", "updates", "plan", "peak MB"} <= folded
    assert not folded & {"job", "state", "best eval/accuracy", "optimizer.lr"}
    table = page.split("<tbody>")[0].rpartition("<thead>")[2]
    assert "samples/s" not in table and f"{len(folded)} columns that are the same for all" in page


def test_jobs_that_were_never_begun_are_listed(tmp_path: Path) -> None:
    swept(tmp_path, 2)
    words = {str(job): [f"optimizer.lr={lr}", "accumulation=1"] for job, lr in enumerate((0.001, 0.01, 0.1, 0.3))}
    (tmp_path / "jobs.json").write_text(json.dumps(words))
    comparison, terminal, page = report(tmp_path)
    assert terminal.startswith("4 jobs, 2 completed") and comparison.failed == 2
    assert "job 3: not begun: the sweep ended before it" in terminal and "lr 0.3" in page
    (tmp_path / "jobs.json").write_text("[1]")
    assert report(tmp_path)[1].startswith("2 jobs, 2 completed")


def test_runs_of_other_programs_are_listed_apart(tmp_path: Path) -> None:
    swept(tmp_path, 2)
    for name, text in (("foreign", "db: {name: x}\nmodel: {width: 3}\n"), ("ours", "parallel: {name: ddp}\n")):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra/config.yaml").write_text(text)
    comparison, terminal, page = report(tmp_path, 200)
    assert len(comparison.runs) == 3 and not {"db.name", "model.width"} & {column.key for column in comparison.columns}
    assert f"left out: {tmp_path / 'foreign'} is a run of another program" in terminal
    assert "foreign is a run of another program" in page


def test_other_tasks_are_listed_and_not_ranked(tmp_path: Path) -> None:
    swept(tmp_path, 2)
    write_run(tmp_path / "2", [1.0], config={"task": "evaluate"}, summary={"best": {"eval/accuracy": 0.99}},
              overrides=["task=evaluate"])  # fmt: skip
    comparison = report(tmp_path)[0]
    assert [run.job for run in comparison.runs] == ["1", "0", "2"] and comparison.best("best eval/accuracy") == 0.6


def test_a_task_that_trains_nothing_leaves_a_summary_too(tmp_path: Path) -> None:
    from isobatch.launch.outcome import Outcome, RunFolder

    RunFolder(tmp_path).settle(Outcome("done"))
    assert json.loads((tmp_path / "summary.json").read_text())["state"] == "completed"
    (tmp_path / "summary.json").write_text('{"state": "completed", "steps": 3}')
    RunFolder(tmp_path).settle(Outcome("done"))
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3
